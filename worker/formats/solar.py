"""The form of Solar Open: messages of thinking, of text or of calls, each call between marks.

<|think|>...<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>ID<|tool_call:name|>NAME
"""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    Expression,
    Lark,
    ModelFormat,
    Section,
    ToolSchema,
    json_arguments,
    marked_calls,
    message_grammar,
)

START, CALL, CALL_END = "<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:end|>"
NAME, ARGUMENTS = "<|tool_call:name|>", "<|tool_call:args|>"
THINK, CONTENT, END, BEGIN = "<|think|>", "<|content|>", "<|end|>", "<|begin|>"
ID_CHARS: Final = 10
_HEAD: Final = regex.compile(
    rf"[^<]*+{regex.escape(NAME)}(?P<name>[^<]++){regex.escape(ARGUMENTS)}"
)
_READ: Final = marked_calls(CALL, _HEAD, CALL_END, "<|calls|>")


def write(lark: Lark, tool: ToolSchema) -> Expression:
    call_id = lark.text_until(NAME, ID_CHARS)
    return lark.row(
        CALL, call_id, lark.quoted(tool.name), ARGUMENTS, json_arguments(lark, tool), CALL_END
    )


FORMATS = (
    ModelFormat(
        is_of=lambda words: words.vocabulary >= {START, CALL, NAME},
        thinking=(THINK, END),
        framing=(BEGIN, END, CONTENT, START, CALL, CALL_END, NAME, ARGUMENTS),
        header=regex.compile(r"(?<=<\|begin\|>)(?:assistant|tool|user|system)"),
        sections=(Section(START, read=_READ), Section(CALL, read=_READ)),
        messages=message_grammar(
            CallGrammar(write, START, start=START, between=""),
            thinking=("", THINK, END),
            behind=f"{BEGIN}assistant",
            final=(CONTENT, ""),
        ),
        part_ends=(END,),
    ),
)
