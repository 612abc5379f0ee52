"""Finds out by rendering probes how a chat template is told to think. Touches no MLX.

Runs once, when a model is loaded. Each template has words of its own for on, off and a level, and
takes most of those that it does not know in silence: a word counts where it changes the prompt.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.shared.wire_messages import (
    TEMPLATE_SWITCHES,
    THINKING_LEVELS,
    ThinkingFacts,
    ThinkingWish,
)
from hearth.worker.prompt.chat_template import SYSTEM_LINE, Template

Variables = dict[str, Any]

# A template's switch is the first of them that it knows.
SWITCHES: Final = (
    *TEMPLATE_SWITCHES,
    (SYSTEM_LINE, None, "/no_think"),  # Nemotron Nano 2
)
LEVEL_VARIABLES: Final = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_NO_LEVELS: Final = ("no_think", "none")  # Hy3's word for off, and OpenAI's
_CLOSING_LEVEL: Final = "minimal"  # no thinking at all where it ends the prompt differently: Solar
_TRAINED_LEVELS: Final = ("low", "medium", "high")  # where a template shows any word
_UNKNOWN_WORD: Final = "probelevel"
_PROBE: Final = [
    {"role": "user", "content": "probe0x"},
    {"role": "assistant", "content": "probe1x", "reasoning_content": "probe2x"},
    {"role": "user", "content": "probe3x"},
]
_SWITCH_NAMES: Final = {name for name, _, _ in SWITCHES}.union(LEVEL_VARIABLES)


@dataclass(frozen=True, slots=True)
class ThinkingSwitches:
    """What one template is given for a wish about thinking. Immutable."""

    told: ThinkingFacts = field(default_factory=ThinkingFacts)  # to clients
    base: Variables = field(default_factory=dict)  # where nobody wishes: mostly none
    on: Variables = field(default_factory=dict)
    off: Variables = field(default_factory=dict)  # the least level where there is no off
    levels: dict[str, Variables] = field(default_factory=dict)  # {} where that is its default
    takes_budget: bool = False

    def variables(self, wish: ThinkingWish) -> Variables:
        """Return the template's variables for `wish`, with the nearest level that it has."""
        if wish.on is False:
            return self.off
        level = self.levels.get(self._nearest(self._level(wish)), {})
        budget = {"thinking_budget": wish.budget} if wish.budget and self.takes_budget else {}
        return {**(self.on if wish.on else self.base), **level, **budget}

    def _level(self, wish: ThinkingWish) -> str | None:
        """Return the level; None where it says how hard to work, and nobody asks for thinking."""
        return wish.level if wish.on or self.told.default != "off" else None

    def _nearest(self, level: str | None) -> str:
        """Return the nearest of the template's levels, of two the higher, as DeepSeek's API."""
        known, place = self.levels if level else {}, THINKING_LEVELS.index
        return min(reversed(known), key=lambda each: abs(place(each) - place(level)), default="")

    def warnings(self, wish: ThinkingWish, own: Variables) -> list[str]:
        """Return, as sentences, what of `wish` is not done as said.

        `own` has the variables that the client gives the template itself: with one of thinking
        among them there is no warning.
        """
        told, level = self.told, self._level(wish)
        is_never, nearest = told.default == "never", self._nearest(level)
        least = f'its least level, "{told.levels[0]}", is used' if told.levels else "it may think"
        rows = (
            (
                wish.on is False and not told.has_switch and not is_never,
                "Thinking cannot be switched off: this model's template has no switch, and "
                f"{least}. Send thinking_budget: 1 instead to end it early, or ask another model.",
            ),
            (
                wish.on and is_never,
                "Thinking cannot be switched on: this model does not think. Ask a model that does.",
            ),
            (
                level and not told.levels and not is_never,
                f'The level "{level}" changes nothing: this model\'s template has no levels. Send '
                "thinking_budget to limit its thinking.",
            ),
            (
                told.levels and level and level != nearest,
                f'This model\'s template has no level "{level}": "{nearest}" is used. Send one of '
                f"{', '.join(told.levels)}.",
            ),
        )
        return [text for is_so, text in rows if is_so and not own.keys() & _SWITCH_NAMES]


def thinking_switches(
    template: Template, thinks: bool = True, is_open: Callable[[str], bool] = lambda _: False
) -> ThinkingSwitches:
    """Return how the template is told to think.

    `thinks`: whether answers may hold thinking. `is_open` tells whether a generation prompt opens
    the thinking.
    """
    found = next((row for row in SWITCHES if _is_known(template, *row)), None)
    name, *states = found or ("enable_thinking", True, False)  # which may count elsewhere
    on, off = ({name: state} for state in states)
    base: Variables = next((each for each in ({}, on, off) if _text(template, each)), {})
    levels, off_level = _levels(template, on)
    has_switch = found is not None or off_level is not None
    shown = _text(template, base)
    if found is None and off_level is not None:
        is_off = _text(template, off_level) == shown
        on, off = levels.get("high", on) if is_off else base, off_level
    elif found is None and levels:
        off = next(iter(levels.values()))
    default = "always" if levels or is_open(_end(shown)) else "adaptive" if thinks else "never"
    if has_switch:
        texts = {"on": _text(template, on), "off": _text(template, off)}
        default = next((each for each, text in texts.items() if text == shown), "adaptive")
    told = ThinkingFacts(default, has_switch, list(levels))
    return ThinkingSwitches(told, base, on, off, levels, name == "thinking_budget")


def _is_known(template: Template, name: str, on: Any, off: Any) -> bool:
    """Whether the template renders the two states differently; of a line, beyond showing it."""
    texts = [_text(template, {name: state}) for state in (on, off)]
    if name == SYSTEM_LINE:
        texts[0] = _text(template, {name: _UNKNOWN_WORD}).replace(_UNKNOWN_WORD, off)
    return all(texts) and texts[0] != texts[1]


def _levels(template: Template, on: Variables) -> tuple[dict[str, Variables], Variables | None]:
    """Return the template's levels of thinking, least first, and the one that is off, if any."""
    for name in LEVEL_VARIABLES:
        base = _text(template, on)
        words = (*_NO_LEVELS, *THINKING_LEVELS, _UNKNOWN_WORD)
        texts = {word: _text(template, {**on, name: word}) for word in words}
        other = texts.pop(_UNKNOWN_WORD)
        known = {word: {name: word} for word, text in texts.items() if text not in ("", other)}
        if not known:
            continue
        if _UNKNOWN_WORD in other.lower():
            known = {word: known[word] for word in _TRAINED_LEVELS if word in known}
        elif other == base and not known.keys() <= {*_NO_LEVELS}:  # its own way is a level too
            rest = (word for word in reversed(_TRAINED_LEVELS) if word not in known)
            known |= {word: {} for word in itertools.islice(rest, 1)}
        closing = [_CLOSING_LEVEL] if _end(texts.get(_CLOSING_LEVEL, "")) != _end(base) else []
        off = next((known[word] for word in (*_NO_LEVELS, *closing) if word in known), None)
        return {word: known[word] for word in THINKING_LEVELS if word in known}, off
    return {}, None


def _end(text: str) -> str:
    """Return the generation prompt, and what else stands behind the last question."""
    return text.rpartition("probe3x")[2]


def _text(template: Template, variables: Variables) -> str:
    """Return the prompt of the probe; "" where the template refuses these variables."""
    return template.probed(_PROBE, **variables)
