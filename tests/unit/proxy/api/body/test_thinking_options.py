"""Every way in which clients say how much to think comes to the same two answers."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from hearth.proxy.api.body import thinking_options
from hearth.proxy.api.body.thinking_options import ThinkingOptions
from hearth.shared.errors import RequestError

LEVELS = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
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
    *LEVELS,
]


def kwargs(**body: Any) -> dict[str, Any]:
    return thinking_options.read(body).template_kwargs


def on(level: str | None = None) -> dict[str, Any]:
    return {"enable_thinking": True} | ({"reasoning_effort": level} if level else {})


OFF = {"enable_thinking": False}
OFF_BY_WORD = OFF | {"reasoning_effort": "low"}


def test_a_client_that_says_nothing_leaves_it_open() -> None:
    assert thinking_options.read({"messages": [], "metadata": {"user_id": "u"}}) == ThinkingOptions(
        {}, None
    )
    assert thinking_options.read({name: None for name in FIELDS}) == ThinkingOptions({}, None)
    assert kwargs(reasoning={"summary": "auto"}, output_config={"format": None}) == {}


def test_an_empty_effort_leaves_it_open() -> None:
    assert kwargs(reasoning_effort="") == {}
    assert kwargs(reasoning={"effort": ""}, output_config={"effort": ""}) == {}


@pytest.mark.parametrize(("word", "level"), LEVELS.items())
def test_every_level_reaches_the_template_as_one_that_it_knows(word: str, level: str) -> None:
    assert kwargs(reasoning_effort=word) == on(level)
    assert kwargs(thinking=word) == on(level)
    assert kwargs(thinking=word.upper()) == on(level)
    assert kwargs(reasoning={"effort": word}) == on(level)
    assert kwargs(reasoning={"level": word}) == on(level)


@pytest.mark.parametrize("word", ["none", "off", "disabled"])
def test_every_word_for_off_is_off(word: str) -> None:
    assert kwargs(reasoning_effort=word) == OFF_BY_WORD
    assert kwargs(thinking=word) == OFF_BY_WORD
    assert kwargs(enable_thinking=word) == OFF_BY_WORD
    assert kwargs(reasoning={"effort": word}) == OFF_BY_WORD


def test_switches_say_no_level() -> None:
    for name in ("enable_thinking", "thinking"):
        assert kwargs(**{name: True}) == on()
        assert kwargs(**{name: "on"}) == on()
        assert kwargs(**{name: False}) == OFF
    assert kwargs(reasoning={"enabled": True}) == on()
    assert kwargs(reasoning={"enabled": False}) == OFF
    assert kwargs(reasoning={"type": "enabled"}) == on()


def test_anthropics_object_has_a_budget_and_its_effort_is_no_switch() -> None:
    enabled = {"thinking": {"type": "enabled", "budget_tokens": 2048}}
    assert thinking_options.read(enabled) == ThinkingOptions(on(), 2048)
    adaptive = {"thinking": {"type": "adaptive", "display": "omitted"}}
    effort = {"output_config": {"effort": "xhigh"}}
    assert thinking_options.read(adaptive | effort) == ThinkingOptions(on("high"), None)
    assert thinking_options.read(effort) == ThinkingOptions({"reasoning_effort": "high"}, None)
    disabled = {"thinking": {"type": "disabled", "budget_tokens": 2048}}
    assert thinking_options.read(disabled) == ThinkingOptions(OFF_BY_WORD, None)


@pytest.mark.parametrize(
    "name", ["thinking_budget", "thinking_token_budget", "thinking_budget_tokens"]
)
def test_a_budget_is_a_number_of_tokens_none_of_them_or_no_limit(name: str) -> None:
    assert thinking_options.read({name: 100}) == ThinkingOptions(on(), 100)
    assert thinking_options.read({name: 100.0}) == ThinkingOptions(on(), 100)
    assert thinking_options.read({name: 0}) == ThinkingOptions(OFF, None)
    assert thinking_options.read({name: -1}) == ThinkingOptions(on(), None)
    assert thinking_options.read({"enable_thinking": True, name: 0}) == ThinkingOptions(on(), 0)
    assert thinking_options.read({"reasoning": {"max_tokens": 7}, name: 100}) == ThinkingOptions(
        on(), 7
    )


def test_the_most_explicit_field_holds() -> None:
    both = {"enable_thinking": False, "reasoning_effort": "high"}
    assert kwargs(**both) == OFF_BY_WORD
    assert kwargs(**both, chat_template_kwargs={"enable_thinking": True}) == on("high")
    assert kwargs(thinking="low", reasoning_effort="high") == on("low")
    assert kwargs(reasoning_effort="low", reasoning={"effort": "high"}) == on("low")
    assert kwargs(enable_thinking=True, metadata={"enable_thinking": False}) == on()
    assert kwargs(reasoning_effort="low", extra_body={"enable_thinking": False}) == on("low")


@pytest.mark.parametrize("place", ["metadata", "extra_body"])
def test_what_is_nested_is_read_and_passed_over_where_it_is_not_understood(place: str) -> None:
    assert kwargs(**{place: {"enable_thinking": False}}) == OFF
    assert kwargs(**{place: {"reasoning": {"effort": "low"}}}) == on("low")
    assert kwargs(**{place: {"enable_thinking": "false"}}) == OFF_BY_WORD
    assert thinking_options.read({place: {"thinking_budget": 9}}) == ThinkingOptions(on(), 9)
    assert kwargs(**{place: {"chat_template_kwargs": {"x": 1, "enable_thinking": True}}}) == {
        "x": 1,
        "enable_thinking": True,
    }
    for odd in ({"thinking": "banana"}, {"reasoning_effort": 5}, {"reasoning": []}, [], "x", 1):
        assert kwargs(**{place: odd}) == {}


def test_the_templates_own_words_reach_it_untouched() -> None:
    given = {"reasoning_effort": "ultra", "thinking": "deep", "x": [1]}
    assert kwargs(chat_template_kwargs=given) == given
    assert kwargs(chat_template_kwargs={"reasoning_effort": "max"}, reasoning_effort="low") == (
        on("max")
    )
    assert kwargs(chat_template_kwargs={"thinking": False}) == {
        "thinking": False,
        "enable_thinking": False,
    }


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
        found = thinking_options.read(body)
    except RequestError as error:
        assert error.status == 400
        assert error.param
        assert any(name in body for name in FIELDS), "nested fields are never refused"
        return
    assert found.budget is None or 0 <= found.budget <= thinking_options.BUDGET_MAX
    if found.template_kwargs.get("enable_thinking") is False:
        assert found.budget is None
