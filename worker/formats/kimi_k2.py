"""The form of Kimi K2: names, numbers and arguments in a section, each call between marks."""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    NUMBER,
    CallGrammar,
    Expression,
    Lark,
    ModelFormat,
    Section,
    ToolSchema,
    json_arguments,
    marked_calls,
)

START, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
CALL_END = "<|tool_call_end|>"
# Without a number it is an id that another server made, where no tool has that name.
_HEAD: Final = regex.compile(
    r"(?P<id>(?:functions\.)?+(?P<name>[^\s<>{}]{1,200}?)(?P<number>:\d++)?+)\s*+"
    + regex.escape(ARGUMENTS)
)
READ: Final = marked_calls(CALL, _HEAD, CALL_END, END)


def write(lark: Lark, tool: ToolSchema) -> Expression:
    head = lark.row(f"{CALL}functions.", lark.quoted(tool.name), ":", NUMBER)
    return lark.row(head, ARGUMENTS, json_arguments(lark, tool), CALL_END)


FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        framing=(START, END, CALL, ARGUMENTS, CALL_END),
        sections=(Section(START, read=READ), Section(CALL, read=READ)),
        grammar=CallGrammar(write, START, start=START, end=END, between=""),
    ),
)
