"""Finds out by probes what a chat template accepts and shows, and how it is told to think.

Runs once, when a model is loaded. Templates differ in what they leave out silently as much as in
what they refuse, so a probe counts only where all its words are in the text, in their order. Each
has words of its own for thinking on, off and a level, and takes most of those that it does not know
in silence: such a word counts where it changes the prompt. Touches no MLX.
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
# How prompts show tools, calls and results; native: as the template itself does.
ToolForm = Literal["native", "manual", "tool_code"]

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
_TALK: Final = [
    {"role": "user", "content": "probe0x"},
    {"role": "assistant", "content": "probe1x", "reasoning_content": "probe2x"},
    {"role": "user", "content": "probe3x"},
]
_SWITCH_NAMES: Final = {name for name, _, _ in SWITCHES}.union(LEVEL_VARIABLES)

_VARIABLES: Final = {  # that templates which are Python functions know, one or the other
    **{name: on for name, on, _ in SWITCHES},
    **dict.fromkeys(LEVEL_VARIABLES, "high"),
    **dict.fromkeys(("preserve_thinking", "drop_thinking"), True),
}
_GEMMA_TURN: Final = "<start_of_turn>"
_SHORT_ID, _OTHER_ID = "abcdefgh0", "abcdefgh1"  # Mistral's takes ids of nine characters only
_LONG_ID = "call_0123456789abcdef"

_QUESTION: Final = {"role": "user", "content": "probe0x"}
_SYSTEM: Final = {"role": "system", "content": ""}

# A message's kind is its role, but "calls" for an assistant's with tool calls. "start" is what the
# first message stands behind, "end" what follows a system message that nothing follows.
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
    "tool": (),  # behind what the template shows of an answer
}
_TAILS: Final[dict[str, tuple[str, ...]]] = {
    "user": ("assistant", "user"),
    "assistant": ("user",),
    "calls": ("tool", "assistant", "user"),
    "tool": ("assistant", "user"),
}


@dataclass(frozen=True, slots=True)
class OwnForm:
    """A model's own form of calls, and of results where that is known. Immutable."""

    calls: Callable[[Sequence[dict[str, Any]]], str]  # those of one message, each as `function`
    result: tuple[str, str] | None = None  # what stands around one
    tools: Callable[[Sequence[dict[str, Any]]], str] | None = None  # shows the model functions


@dataclass(frozen=True, slots=True)
class TemplateCapabilities:
    """The messages and options that one template accepts and shows. Immutable."""

    tool_form: ToolForm
    shows_calls: bool  # as `tool_calls`
    shows_results: bool  # as messages of role "tool"
    # What each tool must have: "description", "parameters", "schema": what is in those, and for
    # "properties" theirs.
    completes_tools: frozenset[str]
    splits_calls: bool  # of several calls in one message, some are refused or left out
    shortens_ids: bool  # call ids must have nine letters and digits
    shows_ids: bool  # of calls, or of results
    names_by_id: bool  # an id is functions.NAME:N, and may be all that is shown of a name
    numbers_by_message: bool  # the template itself writes that N, from 0 in each message
    needs_system: bool  # to show tools
    takes_objects: bool  # arguments may be an object, else only its JSON text
    takes_text: bool  # arguments may be a text
    folds_thinking: bool  # words beside a call are its thinking
    lifts_thinking: bool  # thinking that an answer begins with is looked for in its content
    opens_with_system: bool
    places_system: bool  # a system message in mid-conversation is shown where it stands
    refused: frozenset[tuple[str, str]]  # (kind, kind) that may not follow each other
    variables: frozenset[str] | None  # that it may be given; None: any
    part_kinds: frozenset[str]  # of messages whose text parts are shown, joined its own way
    thinks_in_parts: bool  # an assistant's thinking is a part of its content
    own: OwnForm | None = None  # of the model's calls, where the template shows none


def template_capabilities(template: Template) -> TemplateCapabilities:
    """Return what the template accepts and shows."""
    needs_system = not _shows_tools(template)[0]
    is_shown, completes_tools = _shows_tools(template, *[_SYSTEM] * needs_system)
    tools = [_tool()] if is_shown else []
    shapes: tuple[Any, ...] = ({}, "{}")
    probers = [_Prober(template, tools, each, by_id) for by_id in (False, True) for each in shapes]
    prober = next((each for each in probers if each.shows_calls()), probers[1])
    form: ToolForm = "native"
    if not is_shown:
        is_gemmas = _GEMMA_TURN in template.probed([_QUESTION])
        form = "tool_code" if is_gemmas else "manual"
    # DeepSeek V3.1's shows calls and results, and no tools.
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
        # Templates that are Python functions take those that they know.
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
    """Renders conversations of given kinds, with tools and without, where the template has them."""

    def __init__(
        self, template: Template, tools: list[Any], arguments: Any, by_id: bool = False
    ) -> None:
        """`arguments` are those of the calls in the conversations; `by_id`: ids are looked for."""
        self._template = template
        self.arguments, self.by_id = arguments, by_id
        self._tools = [tools, []] if tools else [tools]

    def takes(self, *kinds: str) -> bool:
        """Whether such a conversation is shown whole, its first message as whose it is."""
        messages = [self._message(kind, at) for at, kind in enumerate(kinds)]
        words = [word for at, kind in enumerate(kinds) for word in _words(kind, at)]
        return all(self._shows(messages, words, tools) for tools in self._tools)

    def _shows(self, messages: list[dict[str, Any]], words: list[str], tools: list[Any]) -> bool:
        text = self._template.probed(messages, tools)
        if messages[0]["role"] == "assistant":  # Llama 3 takes it for the user's, to show tools
            asked = [{**messages[0], "role": "user"}, *messages[1:]]
            if self._template.probed(asked, tools) == text:
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
        """Whether a call behind a result stands where the answer to that was asked for."""
        before, now = (self.text_of_turns([_SHORT_ID] * count) for count in (1, 2))
        return bool(before) and now.startswith(before)

    def shows_parts(self, kind: str, answer: str) -> bool:
        """Whether such a message's text parts are shown as that; a result is behind `answer`."""
        kinds = ("user", answer, "tool") if kind == "tool" else _PARTED[kind]
        messages = [self._message(each, at) for at, each in enumerate(kinds)]
        messages[kinds.index(kind)]["content"] = [text_part("probeax"), text_part("probebx")]
        texts = [self._template.probed(messages, tools) for tools in self._tools]
        return all(_is_told(text, "probeax", "probebx") for text in texts)

    def fits(self, call_id: str = _SHORT_ID, arguments: Any = None, **said: str) -> bool:
        """Whether the template takes a call with this id, said beside it what is said."""
        return bool(self.text_of_turns([call_id], arguments, **said))

    def text_of_turns(self, call_ids: Sequence[str], arguments: Any = None, **said: str) -> str:
        """Return the text of calls with these ids, one behind the other's result, "" of none."""
        function = {"name": "f", "arguments": arguments or self.arguments}
        turns = [self._message("user", 2)]
        for call_id in call_ids:
            call = {"id": call_id, "type": "function", "function": function}
            turns.append({"role": "assistant", "content": "", **said, "tool_calls": [call]})
            turns.append({**self._message("tool", 1), "tool_call_id": call_id})
        return self._template.probed(turns)

    def refused(self, shows_calls: bool, shows_results: bool) -> Iterator[tuple[str, str]]:
        """Yield the kinds that the template refuses, or leaves out, one behind the other."""
        if not self.takes("user", "assistant", "user"):
            return  # then nothing can be learned from what it refuses
        if not self.takes("system"):
            yield "start", "end"
        stands_for = {
            "user": "user",
            "assistant": "assistant",
            "calls": "calls" if shows_calls else "assistant",
            "tool": "tool" if shows_results else "user",
        }
        known = sorted({*stands_for.values()})
        for before in ("start", *known):
            for kind in known:
                kinds = (*_LEADS[before], kind, *_TAILS[kind])
                probe = [stands_for[each] for each in kinds]
                is_taken = self.takes(*probe)
                if before == "start":  # nothing may follow, and no question may be needed
                    is_taken = is_taken and self.takes(kind)
                if before == kind == "tool":  # the second may need a call of its own
                    is_taken = is_taken or self.takes("user", "two calls", *probe[-4:])
                if not is_taken:
                    yield before, kind


def _lifts_thinking(template: Template) -> bool:
    start, end = template.think_tags
    said = f"{start}\nprobe1x\n{end}\n\nprobe2x"
    text = template.probed([_QUESTION, {"role": "assistant", "content": said}, _QUESTION])
    return bool(start) and "probe2x" in text and said not in text


def _shows_tools(template: Template, *lead: dict[str, Any]) -> tuple[bool, frozenset[str]]:
    """Return whether tools are shown, and the fields without which one is refused."""
    probe = [*lead, _QUESTION]
    whole = template.probed(probe, [_tool()])
    is_shown = all(word in whole for word in ("probename", "probedescription", "probeparameter"))
    plain = {"type": "object", "properties": {"probeparameter": {"type": "object"}}}
    lacks = {
        "description": _tool(description=None),
        "parameters": _tool(parameters=None),
        "schema": _tool(parameters={"type": "object"}),
        "properties": _tool(parameters=plain),
    }
    refused = {
        name for name, tool in lacks.items() if "probename" not in template.probed(probe, [tool])
    }
    return is_shown, frozenset(refused if is_shown else ())


def _tool(**changes: Any) -> dict[str, Any]:
    """Return a tool with these `changes`; None for what it is to lack."""
    properties = {"probeparameter": {"type": "string", "description": "probed"}}
    parameters = {"type": "object", "properties": properties, "required": ["probeparameter"]}
    whole = {"name": "probename", "description": "probedescription", "parameters": parameters}
    function = {name: value for name, value in (whole | changes).items() if value is not None}
    return {"type": "function", "function": function}


def _thinks_in_parts(template: Template) -> bool:
    """Whether thinking is shown as a part of the content, and not by a name of its own."""
    said = {"role": "assistant", "content": "probe1x"}
    parts = [{"type": "thinking", "thinking": "probe2x"}, text_part("probe1x")]
    by_name = template.probed([_QUESTION, said | {"reasoning_content": "probe2x"}])
    by_part = template.probed([_QUESTION, said | {"content": parts}])
    return "probe2x" not in by_name and _is_told(by_part, "probe0x", "probe2x")


def _is_told(text: str, one: str, other: str) -> bool:
    """Whether `other` is behind `one`, and no printed record of a part is between them."""
    between, is_found, _ = text.partition(one)[2].partition(other)
    return bool(is_found) and "type" not in between


def _words(kind: str, at: int) -> list[str]:
    return [f"probe{at}x", f"probe{at}y"] if kind == "two calls" else [f"probe{at}x"]


# ---------------------------------------------------------------- thinking


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
    is_on, is_off = (_text(template, {name: state}) for state in (on, off))
    if name == SYSTEM_LINE:
        is_on = _text(template, {name: _UNKNOWN_WORD}).replace(_UNKNOWN_WORD, off)
    return bool(is_on) and bool(is_off) and is_on != is_off


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
    return template.probed(_TALK, **variables)
