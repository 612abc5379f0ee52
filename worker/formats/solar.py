"""The format of Solar Open: messages of thinking, of text or of calls, with marks around calls.

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

START, THINK, CONTENT, END, BEGIN = (
    "<|tool_calls|>",
    "<|think|>",
    "<|content|>",
    "<|end|>",
    "<|begin|>",
)
CALL, NAME, ARGUMENTS, CALL_END = (
    f"<|tool_call:{part}|>" for part in ("begin", "name", "args", "end")
)
_HEAD: Final = regex.compile(
    r"(?P<id>[^<]*+)<\|tool_call:name\|>(?P<name>[^<]++)<\|tool_call:args\|>"
)
_READ: Final = marked_calls(CALL, _HEAD, CALL_END, "<|calls|>")


def write(lark: Lark, tool: ToolSchema) -> Expression:
    head = lark.concat(CALL, lark.text_until(NAME, 10, but="<"), lark.quoted(tool.name), ARGUMENTS)
    return lark.concat(head, json_arguments(lark, tool), CALL_END)


FORMATS = (
    ModelFormat(
        matches=lambda words: words.vocabulary >= {START, CALL, NAME},
        thinking=(THINK, END),
        framing=(BEGIN, END, CONTENT, START, CALL, CALL_END, NAME, ARGUMENTS),
        header=regex.compile(
            r"(?<=<\|begin\|>)(?:assistant|tool|user|system)"
            r"|(?<=<\|tool_call:(?:begin|name)\|>)[^<\s]{1,40}+"
        ),
        sections=(Section(START, read=_READ), Section(CALL, read=_READ)),
        messages=message_grammar(
            CallGrammar(write, START, start=START, between=""),
            thinking=("", THINK, END),
            after_thinking=f"{BEGIN}assistant",
            final=(CONTENT, ""),
        ),
        part_ends=(END,),
    ),
)
