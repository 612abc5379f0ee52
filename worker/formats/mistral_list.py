"""The form of Mistral's older models: `[TOOL_CALLS][{"name": "f", "arguments": {}}]`."""

from hearth.worker.constraint.call_grammars import CallGrammar, json_call
from hearth.worker.formats.mistral import START, read
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.tool_calls.call_parser import Section

FORMAT = ModelFormat(
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
)
