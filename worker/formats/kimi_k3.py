"""The form of Kimi K3: calls and arguments are parts that are opened and closed."""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    NUMBER,
    CallGrammar,
    Expression,
    Lark,
    ModelFormat,
    Section,
    TagForm,
    ToolSchema,
    json_arguments,
)

START, END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_PART: Final = r"<\|open\|>{} (?:[^<>]*? )??{}=\"(?P<{}>[^\"<>]*+)\"[^<>]*+<\|sep\|>"
FORM = TagForm(
    name=('<|open|>call tool="', "<|sep|>"),
    key=('<|open|>argument key="', "<|sep|>"),
    value_end="<|close|>argument<|sep|>",
    call_end="<|close|>call<|sep|>",
    head=regex.compile(_PART.format("call", "tool", "name")),
    opens=regex.compile(_PART.format("argument", "key", "key")),
    begins="<|open|>argument ",
    json_opens=regex.compile(r"<\|open\|>json[^<>]*+<\|sep\|>"),
    json_closes="<|close|>json<|sep|>",
)


def write(lark: Lark, tool: ToolSchema) -> Expression:
    head = lark.row(FORM.name[0], lark.quoted(tool.name), '" index="', NUMBER, '"<|sep|>')
    arguments = lark.row('<|open|>json type="object"<|sep|>', json_arguments(lark, tool))
    return lark.row(head, arguments, FORM.json_closes, FORM.call_end)


FORMATS = (
    ModelFormat(
        is_of=lambda words: (
            words.vocabulary >= {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}
        ),
        framing=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        part_ends=("<|close|>", "<|sep|>"),
        sections=(Section(START, END),),
        form=FORM,
        grammar=CallGrammar(write, START, start=START, end=END, between=""),
    ),
)
