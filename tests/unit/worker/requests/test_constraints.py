"""An answer that must have a form has no room to think where the client switched thinking off."""

import pytest

from hearth.shared.thinking import ThinkingWish
from hearth.shared.wire_messages import Constraints, Prompt, Sampling, Submit
from hearth.worker.requests.request_builder import constraints_of


def submitted(constraints: Constraints, on: bool | None) -> Submit:
    return Submit("r1", Prompt([], thinking=ThinkingWish(on)), Sampling(), constraints)


@pytest.mark.parametrize(
    "constraints", [Constraints(is_json=True), Constraints(tool_choice="required")]
)
def test_a_form_and_no_thinking_leave_no_room_to_think(constraints: Constraints) -> None:
    assert constraints_of(submitted(constraints, on=False)).thinking_budget == 0


@pytest.mark.parametrize(
    ("constraints", "on"),
    [
        (Constraints(is_json=True), True),
        (Constraints(is_json=True, thinking_budget=9), None),
        (Constraints(), False),
        (Constraints(tool_choice="none"), False),
    ],
)
def test_whoever_lets_it_think_or_asks_for_no_form_is_obeyed(
    constraints: Constraints, on: bool | None
) -> None:
    assert constraints_of(submitted(constraints, on)) == constraints
