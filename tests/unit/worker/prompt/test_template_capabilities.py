"""A wish about thinking reaches each template in its own words, and is told where it cannot."""

from typing import Any

import pytest

from hearth.shared.wire_messages import THINKING_LEVELS, ThinkingFacts, ThinkingWish
from hearth.worker.prompt.chat_template import SYSTEM_LINE, Template
from hearth.worker.prompt.template_capabilities import ThinkingSwitches, thinking_switches
from scripts.harness.model_families import bare_tokenizer
from tests.helpers.worker.chat_templates import CHATML, tokenizer_with

ON, OFF = ThinkingWish(True), ThinkingWish(False)
HY3 = (
    "{% set effort = reasoning_effort if reasoning_effort is defined else 'no_think' %}"
    "{% if effort not in ('no_think', 'low', 'high') %}{{ raise_exception('no') }}{% endif %}"
    "{{ '' if effort == 'no_think' else '<think>' + effort }}"
)
GPT_OSS = "Reasoning: {{ reasoning_effort if reasoning_effort is defined else 'medium' }}"
SEED = "{{ 'none' if thinking_budget == 0 else thinking_budget }}"
NANO = "{% if '/no_think' in messages[0].content %}<think></think>{% endif %}"
V4 = (
    "{% if enable_thinking %}<think>"
    "{% if reasoning_effort is defined and reasoning_effort == 'max' %}Max{% endif %}{% endif %}"
)


def switches(ending: str, thinks: bool = True) -> ThinkingSwitches:
    """Return those of a template that ends with `ending`."""
    tokenizer = tokenizer_with(CHATML)
    shown = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    tokenizer.chat_template = bare_tokenizer(tokenizer).chat_template = shown + ending
    return thinking_switches(Template(tokenizer), thinks)


def levels(found: ThinkingSwitches) -> list[Any]:
    return [found.variables(ThinkingWish(True, each)) for each in THINKING_LEVELS]


@pytest.mark.parametrize(
    ("ending", "told", "on", "off"),
    [
        ("{{ enable_thinking }}", ("adaptive", True, []), {"enable_thinking": True}, None),
        (HY3, ("off", True, ["low", "high"]), {"reasoning_effort": "high"}, "no_think"),
        (GPT_OSS, ("always", False, ["low", "medium", "high"]), {"enable_thinking": True}, "low"),
        (SEED, ("adaptive", True, []), {"thinking_budget": -1}, {"thinking_budget": 0}),
        (NANO, ("on", True, []), {SYSTEM_LINE: None}, {SYSTEM_LINE: "/no_think"}),
        (V4, ("off", True, ["high", "max"]), {"enable_thinking": True}, None),
        ("", ("adaptive", False, []), {"enable_thinking": True}, None),
    ],
)
def test_the_words_of_a_template_are_found_by_what_they_change(
    ending: str, told: Any, on: Any, off: Any
) -> None:
    found = switches(ending)
    assert (found.facts, found.variables(ON)) == (ThinkingFacts(*told), on)
    expected = {"reasoning_effort": off} if isinstance(off, str) else off
    assert found.variables(OFF) == (expected or {"enable_thinking": False})
    assert found.variables(ThinkingWish()) == {}


def test_a_level_is_the_templates_own_or_the_nearest_of_them_and_of_two_the_higher() -> None:
    given = [each["reasoning_effort"] for each in levels(switches(HY3))]
    assert given == ["low", "low", "high", "high", "high", "high"]
    given = [each["reasoning_effort"] for each in levels(switches(GPT_OSS))]
    assert given == ["low", "low", "medium", "high", "high", "high"]
    assert ["reasoning_effort" in each for each in levels(switches(V4))] == [False] * 4 + [True] * 2
    assert switches(SEED).variables(ThinkingWish(True, "low", 9)) == {"thinking_budget": 9}


@pytest.mark.parametrize("ending", [HY3, V4])
def test_a_level_alone_neither_switches_thinking_on_nor_is_said_to_be_used(ending: str) -> None:
    found, alone = switches(ending), ThinkingWish(None, "low")
    assert found.variables(alone) == {}
    assert not found.warnings(alone, {})
    assert switches(GPT_OSS).variables(alone) == {"reasoning_effort": "low"}


def test_what_has_no_effect_is_told_unless_the_client_used_the_templates_words() -> None:
    plain, never, least = switches(""), switches("", thinks=False), switches(GPT_OSS)
    (off,), (on,) = plain.warnings(OFF, {}), never.warnings(ON, {})
    assert "cannot be switched off" in off
    assert "cannot be switched on" in on
    (level,) = plain.warnings(ThinkingWish(True, "low"), {})
    assert '"low" changes nothing' in level
    (nearest,) = least.warnings(ThinkingWish(True, "max"), {})
    assert 'no level "max": "high" is used' in nearest
    assert 'its least level, "low", is used' in least.warnings(OFF, {})[0]
    assert not least.warnings(OFF, {"reasoning_effort": "none"})
    for wish in (ON, OFF, ThinkingWish(True, "low"), ThinkingWish()):
        assert not switches(HY3).warnings(wish, {})
