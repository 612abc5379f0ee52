"""Finds out by probes what a chat template accepts and shows, and how thinking is asked for.

Runs once, when a model is loaded. Templates may silently leave out what they do not support, so a
probe succeeds only if the text has all of the probe's words in order. Each template has its own
variables for thinking on, off and by level, and ignores most unknown variables. So a variable
counts only if it changes the prompt. Does not touch MLX.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from hearth.shared.wire_messages import (
    TEMPLATE_SWITCHES,
    THINKING_LEVELS,
    ThinkingFacts,
    ThinkingWish,
)
from hearth.worker.prompt.chat_template import SYSTEM_LINE, Template, text_part

Variables = dict[str, Any]
# How prompts show tools, calls and results; "native" is the template's own way.
ToolForm = Literal["native", "manual", "tool_code"]

# A template's switch is the first of these that changes its prompt.
SWITCHES: Final = (
    *TEMPLATE_SWITCHES,
    (SYSTEM_LINE, None, "/no_think"),  # Nemotron Nano 2
)
LEVEL_VARIABLES: Final = ("reasoning_effort", "thinking_effort", "reasoning_strength")
_NO_LEVELS: Final = ("no_think", "none")  # the words for off in Hy3 and at OpenAI
_CLOSING_LEVEL: Final = "minimal"  # means off if it changes the prompt's end, as in Solar
_TRAINED_LEVELS: Final = ("low", "medium", "high")  # the levels if a template prints any word
_UNKNOWN_WORD: Final = "probelevel"
_TALK: Final = [
    {"role": "user", "content": "probe0x"},
    {"role": "assistant", "content": "probe1x", "reasoning_content": "probe2x"},
    {"role": "user", "content": "probe3x"},
]
_SWITCH_NAMES: Final = {name for name, _, _ in SWITCHES}.union(LEVEL_VARIABLES)

_VARIABLES: Final = {  # variables that a template written in Python may know
    **{name: on for name, on, _ in SWITCHES},
    **dict.fromkeys(LEVEL_VARIABLES, "high"),
    **dict.fromkeys(("preserve_thinking", "drop_thinking"), True),
}
_GEMMA_TURN: Final = "<start_of_turn>"
_SHORT_ID, _OTHER_ID = "abcdefgh0", "abcdefgh1"  # Mistral's template takes only nine characters
_LONG_ID = "call_0123456789abcdef"

_QUESTION: Final = {"role": "user", "content": "probe0x"}
_SYSTEM: Final = {"role": "system", "content": ""}

# A message's kind is its role, or "calls" for an assistant's message with tool calls. "start" is
# before the first message, and "end" is after a system message that no message follows.
_LEADS: Final[dict[str, tuple[str, ...]]] = {
    "start": (),
    "user": ("user",),
    "assistant": ("user", "assistant"),
    "calls": ("user", "calls"),
    "tool": ("user", "calls", "tool"),
}
# Conversations in which a message may have several text parts.
_PARTED: Final = {
    "system": ("system", "user"),
    "user": ("user",),
    "assistant": ("user", "assistant", "user"),
    "calls": ("user", "calls", "tool"),
    "tool": (),  # the probe depends on how the template shows calls
}
_TAILS: Final[dict[str, tuple[str, ...]]] = {
    "user": ("assistant", "user"),
    "assistant": ("user",),
    "calls": ("tool", "assistant", "user"),
    "tool": ("assistant", "user"),
}


@dataclass(frozen=True, slots=True)
class OwnForm:
    """A model's own form of calls, and of results if their form is known. Immutable."""

    calls: Callable[[Sequence[dict[str, Any]]], str]  # renders one message's calls
    result: tuple[str, str] | None = None  # texts around a result
    tools: Callable[[Sequence[dict[str, Any]]], str] | None = None  # shows functions to the model


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """The messages and options that one template accepts and shows. Immutable."""

    tool_form: ToolForm
    shows_calls: bool  # calls given as `tool_calls`
    shows_results: bool  # results given as messages of role "tool"
    # Fields that each tool must have: "description", "parameters", "schema" (the fields of the
    # parameters), "properties" (the fields of each property).
    completes_tools: frozenset[str]
    splits_calls: bool  # several calls in one message are refused or partly left out
    shortens_ids: bool  # call ids must have nine letters and digits
    shows_ids: bool  # ids of calls or results appear in the text
    names_by_id: bool  # an id is functions.NAME:N, perhaps the only place of the name
    numbers_by_message: bool  # the template itself writes N, and begins at 0 in each message
    needs_system: bool  # tools are shown only with a system message
    takes_objects: bool  # arguments may be an object, not only JSON text
    takes_text: bool  # arguments may be any text
    folds_thinking: bool  # words beside a call are shown as thinking
    lifts_thinking: bool  # thinking at the beginning of a content is recognised
    opens_with_system: bool
    places_system: bool  # a later system message is shown in its place
    refused: frozenset[tuple[str, str]]  # (kind, kind) that may not follow each other
    variables: frozenset[str] | None  # variables that may be passed; None = any
    part_kinds: frozenset[str]  # kinds of messages whose text parts the template itself joins
    thinks_in_parts: bool  # an assistant's thinking is a part of the content
    own: OwnForm | None = None  # the model's form of calls, if the template shows none


def template_capabilities(template: Template) -> TemplateCapabilities:
    """Return what the template accepts and shows."""
    needs_system = not _shows_tools(template)[0]
    is_shown, completes_tools = _shows_tools(template, *[_SYSTEM] * needs_system)
    tools = [_tool()] if is_shown else []
    shapes: tuple[Any, ...] = ({}, "{}")
    probers = [
        _Prober(template, tools, shape, by_id) for by_id in (False, True) for shape in shapes
    ]
    prober = next((found for found in probers if found.shows_calls()), probers[1])
    form: ToolForm = "native"
    if not is_shown:
        is_gemmas = _GEMMA_TURN in template.probed([_QUESTION])
        form = "tool_code" if is_gemmas else "manual"
    # DeepSeek V3.1's template shows calls and results, but no tools.
    is_native = is_shown or (prober.shows_calls() and prober.grows())
    shows_calls = is_native and prober.shows_calls()
    answer = "calls" if shows_calls else "assistant"
    shows_results = is_native and prober.takes("user", answer, "tool")
    long_fits, short_fits = prober.fits(call_id=_LONG_ID), prober.fits()
    ids_text = prober.text_of_turns((_SHORT_ID, _OTHER_ID))
    several = ("user", "two calls", *(("tool", "tool") if shows_results else ()))
    return TemplateCapabilities(
        tool_form=form,
        shows_calls=shows_calls,
        shows_results=shows_results,
        completes_tools=completes_tools,
        splits_calls=shows_calls and not prober.takes(*several),
        shortens_ids=short_fits and not long_fits,
        shows_ids=_SHORT_ID in ids_text,
        names_by_id=shows_calls and (prober.by_id or "functions.f:0" in ids_text),
        numbers_by_message="functions.f:0" in ids_text and "functions.f:1" not in ids_text,
        needs_system=needs_system and is_shown,
        takes_objects=prober.arguments == {},
        takes_text=prober.fits(arguments="so") or not short_fits,
        folds_thinking=prober.fits(content="so")
        and not prober.fits(content="so", reasoning_content="why"),
        lifts_thinking=_lifts_thinking(template),
        opens_with_system=prober.takes("system", "user"),
        places_system=prober.takes("user", "assistant", "system", "user"),
        refused=frozenset(prober.refused(shows_calls, shows_results)),
        # A template that is a Python function takes only variables that it knows.
        variables=None
        if template.takes_any_variable
        else frozenset(
            name
            for name, value in _VARIABLES.items()
            if template.probed([_QUESTION], **{name: value})
        ),
        part_kinds=frozenset(kind for kind in _PARTED if prober.shows_parts(kind, answer)),
        thinks_in_parts=_thinks_in_parts(template),
    )


class _Prober:
    """Renders conversations of given kinds without tools, and also with tools if they are shown."""

    def __init__(
        self, template: Template, tools: list[Any], arguments: Any, by_id: bool = False
    ) -> None:
        """Take the calls' `arguments`; with `by_id`, calls are recognised by their ids."""
        self._template = template
        self.arguments, self.by_id = arguments, by_id
        self._tools = [tools, []] if tools else [tools]

    def takes(self, *kinds: str) -> bool:
        """Return whether a conversation of `kinds` is shown whole, the first in its own role."""
        messages = [self._message(kind, at) for at, kind in enumerate(kinds)]
        words = [word for at, kind in enumerate(kinds) for word in _words(kind, at)]
        return all(self._shows(messages, words, tools) for tools in self._tools)

    def _shows(self, messages: list[dict[str, Any]], words: list[str], tools: list[Any]) -> bool:
        text = self._template.probed(messages, tools)
        if messages[0]["role"] == "assistant":  # Llama 3 shows this as a user's, to add tools
            as_question = [{**messages[0], "role": "user"}, *messages[1:]]
            if self._template.probed(as_question, tools) == text:
                return False
        in_order = ".*?".join(map(re.escape, words))
        return re.search(in_order, text, re.DOTALL) is not None

    def _message(self, kind: str, at: int) -> dict[str, Any]:
        if kind == "tool":
            return {
                "role": "tool",
                "content": f"probe{at}x",
                "tool_call_id": _SHORT_ID,
                "name": "f",
            }
        if kind not in ("calls", "two calls"):
            return {"role": kind, "content": f"probe{at}x"}
        calls = [
            {
                "id": word if self.by_id else call_id,
                "type": "function",
                "function": {"name": "f" if self.by_id else word, "arguments": self.arguments},
            }
            for call_id, word in zip((_SHORT_ID, _OTHER_ID), _words(kind, at), strict=False)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def shows_calls(self) -> bool:
        return self.takes("user", "calls") or self.takes("user", "calls", "tool")

    def grows(self) -> bool:
        """Return whether a second call is written exactly where the prompt asked for an answer."""
        before, now = (self.text_of_turns([_SHORT_ID] * count) for count in (1, 2))
        return bool(before) and now.startswith(before)

    def shows_parts(self, kind: str, answer: str) -> bool:
        """Return whether the text parts of a `kind` are shown; a result follows an `answer`."""
        kinds = ("user", answer, "tool") if kind == "tool" else _PARTED[kind]
        messages = [self._message(name, at) for at, name in enumerate(kinds)]
        messages[kinds.index(kind)]["content"] = [text_part("probeax"), text_part("probebx")]
        texts = [self._template.probed(messages, tools) for tools in self._tools]
        return all(_shows_in_order(text, "probeax", "probebx") for text in texts)

    def fits(self, call_id: str = _SHORT_ID, arguments: Any = None, **said: str) -> bool:
        """Return whether the template takes a message with this call and the fields `said`."""
        return bool(self.text_of_turns([call_id], arguments, **said))

    def text_of_turns(self, call_ids: Sequence[str], arguments: Any = None, **said: str) -> str:
        """Return the text of calls with these ids, each followed by a result; "" if refused."""
        function = {"name": "f", "arguments": arguments or self.arguments}
        turns = [self._message("user", 2)]
        for call_id in call_ids:
            call = {"id": call_id, "type": "function", "function": function}
            turns.append({"role": "assistant", "content": "", **said, "tool_calls": [call]})
            turns.append({**self._message("tool", 1), "tool_call_id": call_id})
        return self._template.probed(turns)

    def refused(self, shows_calls: bool, shows_results: bool) -> Iterator[tuple[str, str]]:
        """Yield the pairs of consecutive kinds that the template refuses or leaves out."""
        if not self.takes("user", "assistant", "user"):
            return  # refusals would tell nothing
        if not self.takes("system"):
            yield "start", "end"
        shown_as = {
            "user": "user",
            "assistant": "assistant",
            "calls": "calls" if shows_calls else "assistant",
            "tool": "tool" if shows_results else "user",
        }
        known = sorted({*shown_as.values()})
        for before in ("start", *known):
            for kind in known:
                kinds = (*_LEADS[before], kind, *_TAILS[kind])
                probe = [shown_as[probed_kind] for probed_kind in kinds]
                is_taken = self.takes(*probe)
                if before == "start":  # also without a question and further messages
                    is_taken = is_taken and self.takes(kind)
                if before == kind == "tool":  # the second result may need a call of its own
                    is_taken = is_taken or self.takes("user", "two calls", *probe[-4:])
                if not is_taken:
                    yield before, kind


def _lifts_thinking(template: Template) -> bool:
    start, end = template.think_tags
    content = f"{start}\nprobe1x\n{end}\n\nprobe2x"
    text = template.probed([_QUESTION, {"role": "assistant", "content": content}, _QUESTION])
    return bool(start) and "probe2x" in text and content not in text


def _shows_tools(template: Template, *lead: dict[str, Any]) -> tuple[bool, frozenset[str]]:
    """Return whether tools are shown, and the fields without which a tool is refused."""
    probe = [*lead, _QUESTION]
    text = template.probed(probe, [_tool()])
    is_shown = all(word in text for word in ("probename", "probedescription", "probeparameter"))
    plain = {"type": "object", "properties": {"probeparameter": {"type": "object"}}}
    incomplete = {
        "description": _tool(description=None),
        "parameters": _tool(parameters=None),
        "schema": _tool(parameters={"type": "object"}),
        "properties": _tool(parameters=plain),
    }
    refused = {
        name
        for name, tool in incomplete.items()
        if "probename" not in template.probed(probe, [tool])
    }
    return is_shown, frozenset(refused if is_shown else ())


def _tool(**changes: Any) -> dict[str, Any]:
    """Return a tool with these `changes`; None removes a field."""
    properties = {"probeparameter": {"type": "string", "description": "probed"}}
    parameters = {"type": "object", "properties": properties, "required": ["probeparameter"]}
    whole = {"name": "probename", "description": "probedescription", "parameters": parameters}
    function = {name: value for name, value in (whole | changes).items() if value is not None}
    return {"type": "function", "function": function}


def _thinks_in_parts(template: Template) -> bool:
    """Return whether thinking is shown as a part of the content, and not as a field."""
    message = {"role": "assistant", "content": "probe1x"}
    parts = [{"type": "thinking", "thinking": "probe2x"}, text_part("probe1x")]
    by_name = template.probed([_QUESTION, message | {"reasoning_content": "probe2x"}])
    by_part = template.probed([_QUESTION, message | {"content": parts}])
    return "probe2x" not in by_name and _shows_in_order(by_part, "probe0x", "probe2x")


def _shows_in_order(text: str, first: str, second: str) -> bool:
    """Return whether `second` follows `first`, without a printed dict of a part between them."""
    between, is_found, _ = text.partition(first)[2].partition(second)
    return bool(is_found) and "type" not in between


def _words(kind: str, at: int) -> list[str]:
    return [f"probe{at}x", f"probe{at}y"] if kind == "two calls" else [f"probe{at}x"]


# ---------------------------------------------------------------- thinking


@dataclass(frozen=True, slots=True)
class ThinkingSwitches:
    """The template variables for each wish about thinking. Immutable."""

    facts: ThinkingFacts = field(default_factory=ThinkingFacts)  # reported to clients
    base: Variables = field(default_factory=dict)  # if there is no wish; mostly empty
    on: Variables = field(default_factory=dict)
    off: Variables = field(default_factory=dict)  # the least level if thinking cannot be off
    levels: dict[str, Variables] = field(default_factory=dict)  # {} for the default level
    takes_budget: bool = False

    def variables(self, wish: ThinkingWish) -> Variables:
        """Return the template's variables for `wish`, with the nearest level of the template."""
        if wish.on is False:
            return self.off
        level = self.levels.get(self._nearest(self._level(wish)), {})
        budget = {"thinking_budget": wish.budget} if wish.budget and self.takes_budget else {}
        return {**(self.on if wish.on else self.base), **level, **budget}

    def _level(self, wish: ThinkingWish) -> str | None:
        """Return the wished level; None if thinking is off by default and not switched on."""
        return wish.level if wish.on or self.facts.default != "off" else None

    def _nearest(self, level: str | None) -> str:
        """Return the template's nearest level, or the higher of two, as in DeepSeek's API."""
        known, position = self.levels if level else {}, THINKING_LEVELS.index
        return min(
            reversed(known),
            key=lambda known_level: abs(position(known_level) - position(level)),
            default="",
        )

    def warnings(self, wish: ThinkingWish, own: Variables) -> list[str]:
        """Return a sentence for each part of `wish` that the template cannot follow.

        `own` has the variables that the client itself passes to the template. If one of these
        variables is about thinking, there are no warnings.
        """
        facts, level = self.facts, self._level(wish)
        is_never, nearest = facts.default == "never", self._nearest(level)
        least = f'its least level, "{facts.levels[0]}", is used' if facts.levels else "it may think"
        conditions = (
            (
                wish.on is False and not facts.has_switch and not is_never,
                "Thinking cannot be switched off: this model's template has no switch, and "
                f"{least}. Send thinking_budget: 1 instead to end it early, or ask another model.",
            ),
            (
                wish.on and is_never,
                "Thinking cannot be switched on: this model does not think. Ask a model that does.",
            ),
            (
                level and not facts.levels and not is_never,
                f'The level "{level}" changes nothing: this model\'s template has no levels. Send '
                "thinking_budget to limit its thinking.",
            ),
            (
                facts.levels and level and level != nearest,
                f'This model\'s template has no level "{level}": "{nearest}" is used. Send one of '
                f"{', '.join(facts.levels)}.",
            ),
        )
        return [text for holds, text in conditions if holds and not own.keys() & _SWITCH_NAMES]


def thinking_switches(
    template: Template, thinks: bool = True, is_open: Callable[[str], bool] = lambda _: False
) -> ThinkingSwitches:
    """Return the variables by which the template is asked for thinking.

    `thinks`: whether answers may hold thinking. `is_open` returns whether a generation prompt opens
    the thinking.
    """
    found = next((switch for switch in SWITCHES if _is_known(template, *switch)), None)
    name, *states = found or ("enable_thinking", True, False)  # harmless if unknown
    on, off = ({name: state} for state in states)
    base: Variables = next((given for given in ({}, on, off) if _text(template, given)), {})
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
        default = next((state for state, text in texts.items() if text == shown), "adaptive")
    facts = ThinkingFacts(default, has_switch, list(levels))
    return ThinkingSwitches(facts, base, on, off, levels, name == "thinking_budget")


def _is_known(template: Template, name: str, on: Any, off: Any) -> bool:
    """Return whether the states change the prompt; a line must change more than its own text."""
    is_on, is_off = (_text(template, {name: state}) for state in (on, off))
    if name == SYSTEM_LINE:
        is_on = _text(template, {name: _UNKNOWN_WORD}).replace(_UNKNOWN_WORD, off)
    return bool(is_on) and bool(is_off) and is_on != is_off


def _levels(template: Template, on: Variables) -> tuple[dict[str, Variables], Variables | None]:
    """Return the template's levels of thinking, least first, and the level that means off."""
    for name in LEVEL_VARIABLES:
        base = _text(template, on)
        words = (*_NO_LEVELS, *THINKING_LEVELS, _UNKNOWN_WORD)
        texts = {word: _text(template, {**on, name: word}) for word in words}
        unknown_text = texts.pop(_UNKNOWN_WORD)
        known = {
            word: {name: word} for word, text in texts.items() if text not in ("", unknown_text)
        }
        if not known:
            continue
        if _UNKNOWN_WORD in unknown_text.lower():
            known = {word: known[word] for word in _TRAINED_LEVELS if word in known}
        elif unknown_text == base and not known.keys() <= {
            *_NO_LEVELS
        }:  # the default is a level too
            rest = (word for word in reversed(_TRAINED_LEVELS) if word not in known)
            known |= {word: {} for word in itertools.islice(rest, 1)}
        closing = [_CLOSING_LEVEL] if _end(texts.get(_CLOSING_LEVEL, "")) != _end(base) else []
        off = next((known[word] for word in (*_NO_LEVELS, *closing) if word in known), None)
        return {word: known[word] for word in THINKING_LEVELS if word in known}, off
    return {}, None


def _end(text: str) -> str:
    """Return the text after the last question, with the generation prompt."""
    return text.rpartition("probe3x")[2]


def _text(template: Template, variables: Variables) -> str:
    """Return the prompt of the probe; "" if the template refuses these variables."""
    return template.probed(_TALK, **variables)
