"""Parses the calls behind a mark, in whatever form the model writes them there."""

from dataclasses import dataclass, replace
from typing import Any, Final

import regex

from hearth.worker.stream.answer_parts import ToolCall
from hearth.worker.stream.lookahead_buffer import Marks, ParserSteps, UnreadableOutput
from hearth.worker.stream.tool_calls.call_writer import CallContext
from hearth.worker.stream.tool_calls.json_calls import Trust, json_calls, named_call
from hearth.worker.stream.tool_calls.lenient_json import LenientJsonParser
from hearth.worker.stream.tool_calls.python_calls import python_calls
from hearth.worker.stream.tool_calls.upstream_parsers import (
    UpstreamParser,
    calls_in,
    of_mlx_lm,
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
    """The marks around a model's calls, and the parser for what stands between. Immutable."""

    start: str
    end: str = ""
    parser: UpstreamParser | None = None  # None: only of tools of the request, of any form


def read_calls(context: CallContext, parser: UpstreamParser | None) -> ParserSteps[None]:
    """Read the calls behind the mark that was read, and the mark behind them.

    `parser` is the template's own where the mark is. Raises UnreadableOutput where the next call
    is none, with those before it written and the buffer holding the rest.
    """
    assert context.start, "calls stand behind a mark"
    if context.start in HEADS:
        context.buffer.at -= len(context.start)
    if context.start == MISTRAL:
        yield from _mistral(context)
    elif context.start in (KIMI, KIMI_CALL):
        yield from _kimi(replace(context, end=_KIMI_END), context.end)
    elif context.start == TOOL_CODE:
        yield from _code(context)
    elif context.start == PYTHON_TAG:
        yield from _tagged(context)
    else:
        yield from _section(context, parser)


def _section(context: CallContext, parser: UpstreamParser | None) -> ParserSteps[None]:
    """Read calls up to their end mark, or to where it is missing."""
    buffer = context.buffer
    while True:
        yield from buffer.skip(_BLANKS)
        yield from _one(context, parser)
        for between in (_BLANKS, _JUNK):
            offset = yield from buffer.run(between)
            if (yield from buffer.starts(context.end, offset)):
                buffer.at += offset + len(context.end)
                return
        char = yield from buffer.peek(offset)
        if not char or (yield from buffer.starts(context.start, offset)):
            buffer.at += offset
            return
        if char != "<":
            return
        buffer.hold()
        buffer.at += offset


def _one(context: CallContext, parser: UpstreamParser | None) -> ParserSteps[None]:
    """Read what is one call in most forms, without the mark behind it."""
    buffer = context.buffer
    fence = yield from buffer.match(_FENCE)
    if fence:
        buffer.at += len(fence[0])
        yield from buffer.skip(_BLANKS)
    char = yield from buffer.peek()
    if char == "{" or (char == "[" and (yield from _is_list(context))):
        yield from json_calls(context, Trust(any_name=parser is not None))
        return
    for form in FORMS:
        head = yield from buffer.match(form.head)
        if head:
            yield from _element(context, form, head, parser)
            return
    head = yield from buffer.match(_GEMMA)
    if head:
        buffer.at += len(head[0])
        reader = LenientJsonParser(buffer, context.marks, _QUOTES.get(context.start, ""))
        yield from named_call(context, head["name"], reader)
        return
    for form in BARE_FORMS:
        head = yield from buffer.match(form.head)
        if head and (yield from _is_bare_head(context, form, head)):
            yield from _element(context, form, head, parser)
            return
    yield from _block(context, parser)


def _is_list(context: CallContext) -> ParserSteps[bool]:
    offset = yield from context.buffer.run(_BLANKS, 1)
    return (yield from context.buffer.starts("{", offset))


def _element(
    context: CallContext, form: XmlForm, head: Any, parser: UpstreamParser | None
) -> ParserSteps[None]:
    if parser is None and not context.tools.known(head["name"].strip("\"'")):
        raise UnreadableOutput
    context.buffer.at += len(head[0])
    yield from element_call(context, form, head)


def _is_bare_head(context: CallContext, form: XmlForm, head: Any) -> ParserSteps[bool]:
    """Return whether a name that stands alone begins a call: nearly any text begins with one."""
    offset = yield from context.buffer.run(_BLANKS, len(head[0]))
    if (yield from context.buffer.starts(form.begins, offset)):
        return True
    if not context.tools.known(head[0]):
        return False
    for mark in ("{", *context.marks):
        if (yield from context.buffer.starts(mark, offset)):
            return True
    return not (yield from context.buffer.peek(offset)) and context.buffer.is_complete


def _block(context: CallContext, parser: UpstreamParser | None) -> ParserSteps[None]:
    """Read calls that only a parser can read, once they are whole."""
    buffer = context.buffer
    is_other = parser is not None and not parser.__module__.startswith("mlx_lm.tool_parsers.")
    name = yield from buffer.match(BARE_FORMS[0].head)
    is_named = bool(name) and bool(context.tools.known(name[0]))
    is_list = bool((yield from buffer.match(_PYTHON_LIST)))
    if not is_other and not is_named and not is_list:
        raise UnreadableOutput
    texts: list[str] = []
    mark = yield from buffer.scan(Marks(*context.marks), texts.append)
    buffer.at -= len(mark)
    text = "".join(texts).strip()
    # A name in front of prose that never ends is none of a call.
    is_whole = bool(mark) or (buffer.is_complete and (is_other or is_list))
    if len(text) > BLOCK_CHARS_MAX or not is_whole:
        raise UnreadableOutput
    calls = python_calls(text, context.tools) if is_list else []
    for each in (parser, of_mlx_lm("glm47")):
        if not calls and each:
            calls = [_plain(call, context) for call in calls_in(each, text, context.tools)]
            calls = calls if all(context.tools.known(call.name) for call in calls) else []
    if not calls:
        raise UnreadableOutput
    buffer.release()
    context.write_all(calls)


def _plain(call: ToolCall, context: CallContext) -> ToolCall:
    """Return a call with the text that glm47's parser could not make arguments of."""
    given = call.arguments
    is_raw = isinstance(given, dict) and [*given] == ["raw"]
    if not is_raw or "raw" in context.tools.arguments(call.name):
        return call
    assert isinstance(given, dict)
    return ToolCall(call.name, str(given["raw"]))


def _mistral(context: CallContext) -> ParserSteps[None]:
    """Read a list, or names with arguments behind them; there is no end mark."""
    buffer = context.buffer
    yield from buffer.skip(_BLANKS)
    if (yield from buffer.peek()) in ("[", "{"):
        yield from json_calls(context, Trust())
        return
    head = yield from buffer.match(_MISTRAL)
    while head:
        buffer.at += len(head[0])
        yield from named_call(context, head["name"])
        offset = yield from buffer.run(_BLANKS)
        if not (yield from buffer.match(_MISTRAL_NEXT, offset)):
            return
        buffer.hold()
        buffer.at += offset
        head = yield from buffer.match(_MISTRAL)
    raise UnreadableOutput


def _kimi(context: CallContext, section_end: str) -> ParserSteps[None]:
    """Read the calls of a section, each between marks of its own."""
    buffer = context.buffer
    while True:
        yield from buffer.skip(_BLANKS)
        if (yield from buffer.starts(KIMI_CALL)):
            buffer.at += len(KIMI_CALL)
            yield from buffer.skip(_BLANKS)
        head = yield from buffer.match(_KIMI_HEAD)
        if not head:
            raise UnreadableOutput
        buffer.at += len(head[0])
        yield from named_call(context, head["name"])
        for mark in (_KIMI_END, section_end):
            offset = yield from buffer.run(_JUNK)
            if (yield from buffer.starts(mark, offset)):
                buffer.at += offset + len(mark)
        offset = yield from buffer.run(_BLANKS)
        if not (yield from buffer.starts(KIMI_CALL, offset)):
            return
        buffer.hold()
        buffer.at += offset


def _code(context: CallContext) -> ParserSteps[None]:
    """Read a fenced block of Python that is nothing but calls."""
    texts: list[str] = []
    for _ in range(FENCES_MAX):
        mark = yield from context.buffer.scan(Marks("```"), texts.append)
        if not mark and not context.buffer.is_complete:
            break
        calls = python_calls("".join(texts), context.tools)
        if calls:
            context.buffer.release()
            context.write_all(calls)
            return
        if not mark:
            break
        texts.append(mark)
    raise UnreadableOutput


def _tagged(context: CallContext) -> ParserSteps[None]:
    """Read what Llama writes behind its tag: JSON, or Python up to the end."""
    buffer = context.buffer
    yield from buffer.skip(_BLANKS)
    if (yield from buffer.peek()) == "{":
        yield from json_calls(context, Trust(any_name=False))
        return
    texts: list[str] = []
    yield from buffer.scan(Marks(), texts.append)
    calls = python_calls("".join(texts), context.tools) if buffer.is_complete else []
    if not calls:
        raise UnreadableOutput
    buffer.release()
    context.write_all(calls)
