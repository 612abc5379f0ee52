"""The form of Command R7B, A and A+: a list in JSON between marks, content between others."""

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    json_call,
)

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
