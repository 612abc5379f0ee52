"""Every way in which clients say how much to think comes to the same two answers."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hearth.proxy.api.body import thinking_options
from hearth.shared.errors import RequestError
from hearth.shared.thinking import THINKING_LEVELS, ThinkingWish

FIELDS = [
    "chat_template_kwargs",
    "enable_thinking",
    "thinking",
    "reasoning_effort",
    "reasoning",
    "output_config",
    "thinking_budget",
    "thinking_token_budget",
    "thinking_budget_tokens",
]
WORDS = [
    *("enabled", "type", "effort", "level", "budget_tokens", "max_tokens", "enable_thinking"),
    *("thinking", "reasoning_effort", "reasoning", "on", "off", "none", "disabled", "adaptive"),
    *THINKING_LEVELS,
]


def wish(**body: Any) -> ThinkingWish:
    return thinking_options.read(body)[1]


def kwargs(**body: Any) -> dict[str, Any]:
    return thinking_options.read(body)[0]


def on(level: str | None = None, budget: int | None = None) -> ThinkingWish:
    return ThinkingWish(True, level, budget)


OPEN, OFF = ThinkingWish(), ThinkingWish(False)


def test_a_client_that_says_nothing_leaves_it_open() -> None:
    said = {"messages": [], "metadata": {"user_id": "u"}}
    assert thinking_options.read(said) == ({}, ThinkingWish())
    assert thinking_options.read({name: None for name in FIELDS}) == ({}, ThinkingWish())
    assert wish(reasoning={"summary": "auto"}, output_config={"format": None}) == OPEN


def test_an_empty_effort_leaves_it_open() -> None:
    assert wish(reasoning_effort="") == OPEN
    assert wish(reasoning={"effort": ""}, output_config={"effort": ""}) == OPEN


@pytest.mark.parametrize("level", THINKING_LEVELS)
def test_every_level_is_sent_on_as_the_client_said_it(level: str) -> None:
    word = level
    assert wish(reasoning_effort=word) == on(level)
    assert wish(thinking=word) == on(level)
    assert wish(thinking=word.upper()) == on(level)
    assert wish(reasoning={"effort": word}) == on(level)
    assert wish(reasoning={"level": word}) == on(level)


@pytest.mark.parametrize("word", ["none", "off", "disabled"])
def test_every_word_for_off_is_off(word: str) -> None:
    assert wish(reasoning_effort=word) == OFF
    assert wish(thinking=word) == OFF
    assert wish(enable_thinking=word) == OFF
    assert wish(reasoning={"effort": word}) == OFF


def test_switches_say_no_level() -> None:
    for name in ("enable_thinking", "thinking"):
        assert wish(**{name: True}) == on()
        assert wish(**{name: "on"}) == on()
        assert wish(**{name: False}) == OFF
    assert wish(reasoning={"enabled": True}) == on()
    assert wish(reasoning={"enabled": False}) == OFF
    assert wish(reasoning={"type": "enabled"}) == on()


def test_anthropics_object_has_a_budget_and_its_effort_is_no_switch() -> None:
    enabled = {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    assert wish(**enabled) == on(budget=2048)
    adaptive = {"thinking": {"type": "adaptive", "display": "omitted"}}
    effort = {"output_config": {"effort": "xhigh"}}
    assert wish(**adaptive, **effort) == on("xhigh")
    assert wish(**effort) == ThinkingWish(None, "xhigh")
    disabled = {"thinking": {"type": "disabled", "budget_tokens": 2048}}
    assert wish(**disabled) == OFF


@pytest.mark.parametrize(
    "name", ["thinking_budget", "thinking_token_budget", "thinking_budget_tokens"]
)
def test_a_budget_is_a_number_of_tokens_none_of_them_or_no_limit(name: str) -> None:
    assert wish(**{name: 100}) == on(budget=100)
    assert wish(**{name: 100.0}) == on(budget=100)
    assert wish(**{name: 0}) == OFF
    assert wish(**{name: -1}) == on(budget=None)
    assert wish(**{"enable_thinking": True, name: 0}) == on(budget=0)
    assert wish(**{"reasoning": {"max_tokens": 7}, name: 100}) == on(budget=7)


def test_the_most_explicit_field_holds() -> None:
    both = {"enable_thinking": False, "reasoning_effort": "high"}
    assert wish(**both) == OFF
    assert wish(**both, chat_template_kwargs={"enable_thinking": True}) == on("high")
    assert wish(thinking="low", reasoning_effort="high") == on("low")
    assert wish(reasoning_effort="low", reasoning={"effort": "high"}) == on("low")
    assert wish(enable_thinking=True, metadata={"enable_thinking": False}) == on()
    assert wish(reasoning_effort="low", extra_body={"enable_thinking": False}) == on("low")


@pytest.mark.parametrize("place", ["metadata", "extra_body"])
def test_what_is_nested_is_read_and_passed_over_where_it_is_not_understood(place: str) -> None:
    assert wish(**{place: {"enable_thinking": False}}) == OFF
    assert wish(**{place: {"reasoning": {"effort": "low"}}}) == on("low")
    assert wish(**{place: {"enable_thinking": "false"}}) == OFF
    assert wish(**{place: {"thinking_budget": 9}}) == on(budget=9)
    nested = {place: {"chat_template_kwargs": {"x": 1, "enable_thinking": "false"}}}
    assert kwargs(**nested) == {"x": 1, "enable_thinking": False}
    assert wish(**nested) == OFF
    for odd in ({"thinking": "banana"}, {"reasoning_effort": 5}, {"reasoning": []}, [], "x", 1):
        assert wish(**{place: odd}) == OPEN


def test_the_templates_own_words_reach_it_untouched() -> None:
    given = {"reasoning_effort": "ultra", "thinking": "deep", "x": [1]}
    assert thinking_options.read({"chat_template_kwargs": given}) == (given, ThinkingWish())
    both = {"chat_template_kwargs": {"reasoning_effort": "max"}, "reasoning_effort": "low"}
    assert thinking_options.read(both) == ({"reasoning_effort": "max"}, on("low"))
    off = {"reasoning_effort": "none"}  # each template has a word of its own for it
    assert thinking_options.read({"chat_template_kwargs": off}) == ({}, OFF)
    for name, word in (("thinking", False), ("thinking_mode", "disabled"), ("reasoning", False)):
        own = {name: word}
        assert thinking_options.read({"chat_template_kwargs": own}) == (own, OFF)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"reasoning_effort": "banana"}, "reasoning_effort"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"reasoning_effort": True}, "reasoning_effort"),
        ({"thinking": "banana"}, "thinking"),
        ({"thinking": []}, "thinking"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -2}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2**31}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens"),
        ({"reasoning": {"effort": "banana"}}, "reasoning.effort"),
        ({"reasoning": {"enabled": 1}}, "reasoning.enabled"),
        ({"output_config": {"effort": "banana"}}, "output_config.effort"),
        ({"output_config": "high"}, "output_config"),
        ({"enable_thinking": 1}, "enable_thinking"),
        ({"thinking_budget": "many"}, "thinking_budget"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_a_field_of_the_api_is_refused_by_name_with_what_is_allowed(body: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        thinking_options.read(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "allowed is" in str(caught.value)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=4)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(FIELDS + WORDS), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=200)
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
        assert wish == OFF
