"""An answer that must have a form has no room to think where the client switched thinking off."""

import pytest

from hearth.shared.wire_messages import Constraints, Prompt, Sampling, Submit
from hearth.worker.requests.request_builder import constraints_of


def submitted(constraints: Constraints, **template_kwargs: object) -> Submit:
    return Submit("r1", Prompt([], template_kwargs=template_kwargs), Sampling(), constraints)


@pytest.mark.parametrize(
    "constraints", [Constraints(is_json=True), Constraints(tool_choice="required")]
)
def test_a_form_and_no_thinking_leave_no_room_to_think(constraints: Constraints) -> None:
    assert constraints_of(submitted(constraints, enable_thinking=False)).thinking_budget == 0


@pytest.mark.parametrize(
    ("constraints", "options"),
    [
        (Constraints(is_json=True), {"enable_thinking": True}),
        (Constraints(is_json=True, thinking_budget=9), {}),
        (Constraints(), {"enable_thinking": False}),
        (Constraints(tool_choice="none"), {"enable_thinking": False}),
    ],
)
def test_whoever_lets_it_think_or_asks_for_no_form_is_obeyed(
    constraints: Constraints, options: dict[str, bool]
) -> None:
    assert constraints_of(submitted(constraints, **options)) == constraints
