"""Every way in which clients say how much to think comes to the same two answers."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.api.body import thinking_options
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import THINKING_LEVELS, ThinkingWish
from tests.helpers.cases import cases

FIELDS = [
    *("chat_template_kwargs", "enable_thinking", "thinking", "reasoning_effort", "reasoning"),
    *("output_config", "thinking_budget", "thinking_token_budget", "thinking_budget_tokens"),
]
WORDS = [
    *("enabled", "type", "effort", "level", "budget_tokens", "max_tokens", "enable_thinking"),
    *("thinking", "reasoning_effort", "reasoning", "on", "off", "none", "disabled", "adaptive"),
    *THINKING_LEVELS,
]


@pytest.mark.parametrize("case", cases("api/thinking.yaml", "read"))
def test_what_is_said_of_thinking_is_a_wish_and_the_templates_own_words(
    case: dict[str, Any],
) -> None:
    for body in case["bodies"]:
        kwargs, wish = thinking_options.read(body)
        assert wish == ThinkingWish(**case["wish"])
        assert kwargs == case.get("template_kwargs", {})


def test_every_level_of_ours_is_in_the_table() -> None:
    told = {row.values[0]["wish"].get("level") for row in cases("api/thinking.yaml", "read")}
    assert told >= set(THINKING_LEVELS)


@pytest.mark.parametrize(
    ("param", "bodies"),
    [(row.id, row.values[0]) for row in cases("api/thinking.yaml", "refused")],
)
def test_a_field_of_the_api_is_refused_by_name_with_what_is_allowed(
    param: str, bodies: list[Any]
) -> None:
    for body in bodies:
        with pytest.raises(RequestError, match="allowed is") as caught:
            thinking_options.read(body)
        assert (caught.value.status, caught.value.param) == (400, param)


JSON = st.recursive(
    (
        st.none()
        | st.booleans()
        | st.integers(-(2**40), 2**40)
        | st.floats()
        | st.sampled_from(WORDS)
        | st.text(max_size=4)
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS + WORDS), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "extra_body", "metadata"]), JSON, max_size=4))
def test_any_json_in_any_field_gives_an_answer_or_a_refusal(body: dict[str, Any]) -> None:
    try:
        _, wish = thinking_options.read(body)
    except RequestError as error:
        assert error.status == 400
        assert error.param
        assert any(name in body for name in FIELDS), "nested fields are never refused"
        return
    budget = wish.budget
    assert budget is None or 0 <= budget <= thinking_options.BUDGET_MAX
    if wish.on is False:
        assert wish == ThinkingWish(False)
