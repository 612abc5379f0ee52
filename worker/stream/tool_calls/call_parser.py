"""Calls behind a mark, in whatever form the model writes them there."""

from dataclasses import dataclass, replace
from typing import Any, Final

import regex

from hearth.worker.stream.answer_parts import ToolCall
from hearth.worker.stream.lookahead_buffer import Marks, ParserSteps, UnreadableOutput
from hearth.worker.stream.tool_calls.call_writer import CallContext
from hearth.worker.stream.tool_calls.json_calls import Trust, json_calls, named_call
from hearth.worker.stream.tool_calls.lenient_json import LenientJsonParser
from hearth.worker.stream.tool_calls.upstream_parsers import (
    UpstreamParser,
    calls_in,
    of_mlx_lm,
    python_calls,
)
from hearth.worker.stream.tool_calls.xml_calls import BARE_FORMS, FORMS, XmlForm, element_call

BLOCK_CHARS_MAX: Final = 100_000  # of a call that only a parser can read
FENCES_MAX: Final = 8  # that are tried as the end of a block of code
MISTRAL: Final = "[TOOL_CALLS]"
PYTHON_TAG: Final = "<|python_tag|>"  # Llama 3 may write it in front of a call
TOOL_CODE: Final = "```tool_code"  # Gemma 2 and 3
KIMI: Final = "<|tool_calls_section_begin|>"
KIMI_CALL: Final = "<|tool_call_begin|>"
_KIMI_END: Final = "<|tool_call_end|>"
# Marks that are the beginning of the call itself.
HEADS: Final = frozenset({"<function=", "<function name="})
# Marks around strings in which nothing is escaped, by the mark in front of the call.
_QUOTES: Final = {"<|tool_call>": '<|"|>', "<start_function_call>": "<escape>"}

_BLANKS: Final = regex.compile(r"\s*+")
_FENCE: Final = regex.compile(r"```\w*+(?=\W)")
# What may be too much behind a call.
_JUNK: Final = regex.compile(r"[\s}\])\"'`,;]*+")
_GEMMA: Final = regex.compile(r"call:(?P<name>[\w.:-]++)\s*+(?=\{)")
_MISTRAL: Final = regex.compile(
    r"(?P<name>[\w./:-]++)\s*+(?:\[CALL_ID\]\s*+[\w-]++\s*+)?+(?:\[ARGS\]\s*+)?+(?=\{)"
)
_MISTRAL_NEXT: Final = regex.compile(r"[\w./:-]++\[ARGS\]")
_KIMI_HEAD: Final = regex.compile(
    r"(?:functions\.)?+(?P<name>[^\s:<>{}]++)(?::\d++)?+\s*+<\|tool_call_argument_begin\|>"
)
_PYTHON_LIST: Final = regex.compile(r"\[\s*+[\w.-]++\s*+\(")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The calls that a model writes between two marks."""

    start: str
    end: str = ""
    parser: UpstreamParser | None = None  # None: only of tools of the request, of any form


def read_calls(desk: CallContext, parser: UpstreamParser | None) -> ParserSteps[None]:
    """Read the calls behind the mark that was read, and the mark behind them.

    `parser` is the template's own where the mark is. Raises Unreadable where the next call is
    none, with those before it delivered and the source holding the rest.
    """
    if desk.start in HEADS:
        desk.source.at -= len(desk.start)
    if desk.start == MISTRAL:
        yield from _mistral(desk)
    elif desk.start in (KIMI, KIMI_CALL):
        yield from _kimi(replace(desk, end=_KIMI_END), desk.end)
    elif desk.start == TOOL_CODE:
        yield from _code(desk)
    elif desk.start == PYTHON_TAG:
        yield from _tagged(desk)
    else:
        yield from _section(desk, parser)


def _section(desk: CallContext, parser: UpstreamParser | None) -> ParserSteps[None]:
    """Read calls up to their end mark, or to where it is missing."""
    source = desk.source
    while True:
        source.at += yield from source.run(_BLANKS)
        yield from _one(desk, parser)
        for between in (_BLANKS, _JUNK):
            offset = yield from source.run(between)
            if (yield from source.starts(desk.end, offset)):
                source.at += offset + len(desk.end)
                return
        char = yield from source.peek(offset)
        if not char or (yield from source.starts(desk.start, offset)):
            source.at += offset
            return
        if char != "<":
            return
        source.hold()
        source.at += offset


def _one(desk: CallContext, parser: UpstreamParser | None) -> ParserSteps[None]:
    """Read what is one call in most forms, without the mark behind it."""
    source = desk.source
    fence = yield from source.match(_FENCE)
    if fence:
        source.at += len(fence[0])
        source.at += yield from source.run(_BLANKS)
    char = yield from source.peek()
    if char == "{" or (char == "[" and (yield from _is_list(desk))):
        yield from json_calls(desk, Trust(any_name=parser is not None))
        return
    for form in FORMS:
        head = yield from source.match(form.head)
        if head:
            yield from _element(desk, form, head, parser)
            return
    head = yield from source.match(_GEMMA)
    if head:
        source.at += len(head[0])
        reader = LenientJsonParser(source, desk.marks, _QUOTES.get(desk.start, ""))
        yield from named_call(desk, head["name"], reader)
        return
    for form in BARE_FORMS:
        head = yield from source.match(form.head)
        if head and (yield from _is_bare_head(desk, form, head)):
            yield from _element(desk, form, head, parser)
            return
    yield from _block(desk, parser)


def _is_list(desk: CallContext) -> ParserSteps[bool]:
    offset = yield from desk.source.run(_BLANKS, 1)
    return (yield from desk.source.starts("{", offset))


def _element(
    desk: CallContext, form: XmlForm, head: Any, parser: UpstreamParser | None
) -> ParserSteps[None]:
    if parser is None and not desk.tools.known(head["name"].strip("\"'")):
        raise UnreadableOutput
    desk.source.at += len(head[0])
    yield from element_call(desk, form, head)


def _is_bare_head(desk: CallContext, form: XmlForm, head: Any) -> ParserSteps[bool]:
    """Tell whether a name that stands alone begins a call: nearly any text begins with one."""
    offset = yield from desk.source.run(_BLANKS, len(head[0]))
    if (yield from desk.source.starts(form.begins, offset)):
        return True
    if not desk.tools.known(head[0]):
        return False
    for mark in ("{", *desk.marks):
        if (yield from desk.source.starts(mark, offset)):
            return True
    return not (yield from desk.source.peek(offset)) and desk.source.is_complete


def _block(desk: CallContext, parser: UpstreamParser | None) -> ParserSteps[None]:
    """Read calls that only a parser can read, once they are whole."""
    source = desk.source
    is_other = parser is not None and not parser.__module__.startswith("mlx_lm.tool_parsers.")
    name = yield from source.match(BARE_FORMS[0].head)
    is_named = bool(name) and bool(desk.tools.known(name[0]))
    is_list = bool((yield from source.match(_PYTHON_LIST)))
    if not is_other and not is_named and not is_list:
        raise UnreadableOutput
    texts: list[str] = []
    mark = yield from source.scan(Marks(*desk.marks), texts.append)
    source.at -= len(mark)
    text = "".join(texts).strip()
    # A name in front of prose that never ends is none of a call.
    is_whole = bool(mark) or (source.is_complete and (is_other or is_list))
    if len(text) > BLOCK_CHARS_MAX or not is_whole:
        raise UnreadableOutput
    calls = python_calls(text, desk.tools) if is_list else []
    for each in (parser, of_mlx_lm("glm47")):
        if not calls and each:
            calls = [_plain(call, desk) for call in calls_in(each, text, desk.tools)]
            calls = calls if all(desk.tools.known(call.name) for call in calls) else []
    if not calls:
        raise UnreadableOutput
    source.release()
    desk.deliver_all(calls)


def _plain(call: ToolCall, desk: CallContext) -> ToolCall:
    """Return a call with the text that glm47's parser could not make arguments of."""
    given = call.arguments
    is_raw = isinstance(given, dict) and [*given] == ["raw"]
    if not is_raw or "raw" in desk.tools.arguments(call.name):
        return call
    assert isinstance(given, dict)
    return ToolCall(call.name, str(given["raw"]))


def _mistral(desk: CallContext) -> ParserSteps[None]:
    """Read a list, or names with arguments behind them; there is no end mark."""
    source = desk.source
    source.at += yield from source.run(_BLANKS)
    if (yield from source.peek()) in ("[", "{"):
        yield from json_calls(desk, Trust())
        return
    head = yield from source.match(_MISTRAL)
    while head:
        source.at += len(head[0])
        yield from named_call(desk, head["name"])
        offset = yield from source.run(_BLANKS)
        if not (yield from source.match(_MISTRAL_NEXT, offset)):
            return
        source.hold()
        source.at += offset
        head = yield from source.match(_MISTRAL)
    raise UnreadableOutput


def _kimi(desk: CallContext, section_end: str) -> ParserSteps[None]:
    """Read the calls of a section, each between marks of its own."""
    source = desk.source
    while True:
        source.at += yield from source.run(_BLANKS)
        if (yield from source.starts(KIMI_CALL)):
            source.at += len(KIMI_CALL)
            source.at += yield from source.run(_BLANKS)
        head = yield from source.match(_KIMI_HEAD)
        if not head:
            raise UnreadableOutput
        source.at += len(head[0])
        yield from named_call(desk, head["name"])
        for mark in (_KIMI_END, section_end):
            offset = yield from source.run(_JUNK)
            if (yield from source.starts(mark, offset)):
                source.at += offset + len(mark)
        offset = yield from source.run(_BLANKS)
        if not (yield from source.starts(KIMI_CALL, offset)):
            return
        source.hold()
        source.at += offset


def _code(desk: CallContext) -> ParserSteps[None]:
    """Read a fenced block of Python that is nothing but calls."""
    texts: list[str] = []
    for _ in range(FENCES_MAX):
        mark = yield from desk.source.scan(Marks("```"), texts.append)
        if not mark and not desk.source.is_complete:
            break
        calls = python_calls("".join(texts), desk.tools)
        if calls:
            desk.source.release()
            desk.deliver_all(calls)
            return
        if not mark:
            break
        texts.append(mark)
    raise UnreadableOutput


def _tagged(desk: CallContext) -> ParserSteps[None]:
    """Read what Llama writes behind its tag: JSON, or Python up to the end."""
    source = desk.source
    source.at += yield from source.run(_BLANKS)
    if (yield from source.peek()) == "{":
        yield from json_calls(desk, Trust(any_name=False))
        return
    texts: list[str] = []
    yield from source.scan(Marks(), texts.append)
    calls = python_calls("".join(texts), desk.tools) if source.is_complete else []
    if not calls:
        raise UnreadableOutput
    source.release()
    desk.deliver_all(calls)
