"""The form of Kimi K2: names, numbers and arguments in a section, each call between marks."""

from dataclasses import replace
from typing import Final

import regex

from hearth.worker.constraint.call_grammars import NUMBER, CallGrammar, json_arguments
from hearth.worker.constraint.json_schemas import ToolSchema
from hearth.worker.constraint.lark_builder import Expression, Lark
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.lookahead_buffer import ParserSteps, UnreadableOutput
from hearth.worker.stream.tool_calls.call_parser import BLANKS, JUNK, Section
from hearth.worker.stream.tool_calls.call_writer import CallContext
from hearth.worker.stream.tool_calls.json_calls import named_call

START, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
_HEAD: Final = regex.compile(
    rf"(?:functions\.)?+(?P<name>[^\s:<>{{}}]++)(?::\d++)?+\s*+{regex.escape(ARGUMENTS)}"
)


def read(context: CallContext) -> ParserSteps[None]:
    """Read the calls of a section, each between marks of its own."""
    context = replace(context, end=CALL_END)
    buffer = context.buffer
    while True:
        yield from buffer.skip(BLANKS)
        if (yield from buffer.starts(CALL)):
            buffer.at += len(CALL)
            yield from buffer.skip(BLANKS)
        head = yield from buffer.match(_HEAD)
        if not head:
            raise UnreadableOutput
        buffer.at += len(head[0])
        yield from named_call(context, head["name"])
        for mark in (CALL_END, END):
            offset = yield from buffer.run(JUNK)
            if (yield from buffer.starts(mark, offset)):
                buffer.at += offset + len(mark)
        offset = yield from buffer.run(BLANKS)
        if not (yield from buffer.starts(CALL, offset)):
            return
        buffer.hold()
        buffer.at += offset


def write(lark: Lark, tool: ToolSchema) -> Expression:
    head = lark.row(f"{CALL}functions.", lark.quoted(tool.name), ":", NUMBER)
    return lark.row(head, ARGUMENTS, json_arguments(lark, tool), CALL_END)


FORMAT = ModelFormat(
    is_of=lambda words: START in words.template,
    sections=(Section(START, read=read), Section(CALL, read=read)),
    grammar=CallGrammar(write, START, start=START, end=END, between=""),
)
