"""The form of Command R7B, A and A+: a list in JSON between marks, content between others."""

from hearth.worker.constraint.call_grammars import CallGrammar, json_call
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.tool_calls.call_parser import Section

START, END = "<|START_ACTION|>", "<|END_ACTION|>"
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
        framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        part_ends=("<|END_RESPONSE|>", "<|END_TEXT|>"),
        sections=(Section(START, END),),
        grammar=CallGrammar(
            json_call('{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}"),
            START,
            start=f"{START}[\n    ",
            end=f"\n]{END}",
            between=",\n    ",
        ),
    ),
)
