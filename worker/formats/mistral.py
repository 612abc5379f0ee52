"""The formats of Mistral: `[TOOL_CALLS]f[ARGS]{}`, and in older models a list in JSON."""

from dataclasses import replace
from functools import partial
from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    BLANKS,
    CallContext,
    CallGrammar,
    ModelFormat,
    ParserSteps,
    Section,
    Trust,
    UnreadableOutput,
    json_arguments,
    json_call,
    json_calls,
    named_call,
)

START = "[TOOL_CALLS]"
_HEAD: Final = regex.compile(
    r"(?P<name>[\w./:-]++)\s*+(?:\[CALL_ID\]\s*+(?P<id>[\w-]++)\s*+)?+(?:\[ARGS\]\s*+)?+(?=\{)"
)
_NEXT: Final = regex.compile(r"[\w./:-]++\[ARGS\]")


def read(context: CallContext, has_id: bool = False) -> ParserSteps[None]:
    """Read a list, or names followed by their arguments; there is no end mark.

    `has_id`: the calls of a list have ids, which stand after their arguments.
    """
    buffer = context.buffer
    yield from buffer.skip(BLANKS)
    if (yield from buffer.peek()) in ("[", "{"):
        yield from json_calls(context, Trust(has_id=has_id))
        return
    head = yield from buffer.take_match(_HEAD)
    while head:
        yield from named_call(context, head["name"], call_id=head["id"] or "")
        offset = yield from buffer.offset_after(BLANKS)
        if not (yield from buffer.match(_NEXT, offset)):
            return
        buffer.hold()
        head = yield from buffer.take_match(_HEAD, offset)
    raise UnreadableOutput


_NAMED: Final = ModelFormat(
    matches=lambda words: START in words.template and "[ARGS]" in words.vocabulary,
    sections=(Section(START, read=read),),
    grammar=CallGrammar(json_call(START, "[ARGS]", ""), START, between=""),
)
FORMATS = (
    _NAMED,
    replace(
        _NAMED,
        matches=lambda words: _NAMED.matches(words) and "[CALL_ID]" in words.vocabulary,
        rank=-1,
        grammar=CallGrammar(
            lambda lark, tool: lark.concat(
                *(START, lark.quoted(tool.name)),
                lark.optional("[CALL_ID]", lark.rule("/[a-zA-Z0-9]{9}/")),
                *("[ARGS]", json_arguments(lark, tool)),
            ),
            START,
            between="",
        ),
    ),
    replace(
        _NAMED,
        matches=lambda words: _NAMED.matches(words) and "[THINK]" in words.vocabulary,
        rank=-2,
        thinking=("[THINK]", "[/THINK]"),
    ),
    replace(
        _NAMED,
        matches=lambda words: START in words.template,
        rank=1,
        sections=(Section(START, read=partial(read, has_id=True)),),
        grammar=CallGrammar(
            lambda lark, tool: lark.concat(
                json_call('{"name": "', '", "arguments": ', "")(lark, tool),
                lark.optional(
                    ', "id": ', lark.json({"type": "string", "pattern": "^[a-zA-Z0-9]{9}$"})
                ),
                "}",
            ),
            START,
            start=f"{START}[",
            end="]",
            between=", ",
        ),
    ),
)
