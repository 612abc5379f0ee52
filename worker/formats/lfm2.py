"""The form of LFM2: a list of calls in Python between marks."""

from hearth.worker.constraint.call_grammars import CallGrammar, python_call
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.tool_calls.call_parser import Section

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
FORMATS = (
    ModelFormat(
        is_of=lambda words: (
            START in words.template
            or "<|tool_list_start|>" in words.template
            or words.vocabulary >= {START, END}
        ),
        sections=(Section(START, END),),
        grammar=CallGrammar(python_call, START, start=f"{START}[", end=f"]{END}", between=", "),
    ),
)
