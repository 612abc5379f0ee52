"""The form of Kimi K3: calls and arguments are parts that are opened and closed."""

from typing import Final

import regex

from hearth.worker.constraint.call_grammars import NUMBER, CallGrammar, json_arguments
from hearth.worker.constraint.json_schemas import ToolSchema
from hearth.worker.constraint.lark_builder import Expression, Lark
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.tool_calls.call_parser import Section
from hearth.worker.stream.tool_calls.tag_form import TagForm

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
        sections=(Section(START, END),),
        form=FORM,
        grammar=CallGrammar(write, START, start=START, end=END, between=""),
    ),
)
