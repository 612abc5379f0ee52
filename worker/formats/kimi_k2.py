"""The format of Kimi K2: a section of calls; each has a name, a number and arguments."""

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
# Another server's id has no number, and is no tool's name.
_HEAD: Final = regex.compile(
    r"(?P<id>(?:functions\.)?+(?P<name>[^\s<>{}]{1,200}?)(?P<number>:\d++)?+)\s*+"
    + regex.escape(ARGUMENTS)
)
READ: Final = marked_calls(CALL, _HEAD, CALL_END, END)


def write(lark: Lark, tool: ToolSchema) -> Expression:
    head = lark.concat(f"{CALL}functions.", lark.quoted(tool.name), ":", NUMBER)
    return lark.concat(head, ARGUMENTS, json_arguments(lark, tool), CALL_END)


FORMATS = (
    ModelFormat(
        matches=lambda words: START in words.template,
        framing=(START, END, CALL, ARGUMENTS, CALL_END),
        sections=(Section(START, read=READ), Section(CALL, read=READ)),
        grammar=CallGrammar(write, START, start=START, end=END, between=""),
    ),
)
