"""The forms of Mistral: `[TOOL_CALLS]f[ARGS]{}`, and in older models a list in JSON."""

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
    json_call,
    json_calls,
    named_call,
)

START = "[TOOL_CALLS]"
_HEAD: Final = regex.compile(
    r"(?P<name>[\w./:-]++)\s*+(?:\[CALL_ID\]\s*+[\w-]++\s*+)?+(?:\[ARGS\]\s*+)?+(?=\{)"
)
_NEXT: Final = regex.compile(r"[\w./:-]++\[ARGS\]")


def read(context: CallContext) -> ParserSteps[None]:
    """Read a list, or names with arguments behind them; there is no end mark."""
    buffer = context.buffer
    yield from buffer.skip(BLANKS)
    if (yield from buffer.peek()) in ("[", "{"):
        yield from json_calls(context, Trust())
        return
    head = yield from buffer.match(_HEAD)
    while head:
        buffer.at += len(head[0])
        yield from named_call(context, head["name"])
        offset = yield from buffer.run(BLANKS)
        if not (yield from buffer.match(_NEXT, offset)):
            return
        buffer.hold()
        buffer.at += offset
        head = yield from buffer.match(_HEAD)
    raise UnreadableOutput


FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template and "[ARGS]" in words.vocabulary,
        thinking=("[THINK]", "[/THINK]"),
        sections=(Section(START, read=read),),
        grammar=CallGrammar(json_call(START, "[ARGS]", ""), START, between=""),
    ),
    ModelFormat(
        is_of=lambda words: START in words.template,
        rank=1,
        thinking=("[THINK]", "[/THINK]"),
        sections=(Section(START, read=read),),
        grammar=CallGrammar(
            json_call('{"name": "', '", "arguments": ', "}"),
            START,
            start=f"{START}[",
            end="]",
            between=", ",
        ),
    ),
)
