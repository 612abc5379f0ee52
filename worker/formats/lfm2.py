"""The formats of LFM2 and Olmo 3: calls in Python between marks."""

from hearth.worker.formats.shared.format_parts import CallGrammar, ModelFormat, Section, python_call
from hearth.worker.formats.shared.python_text import python_text

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
CALLS, CALLS_END = "<function_calls>", "</function_calls>"


FORMATS = (
    ModelFormat(
        matches=lambda words: (
            START in words.template
            or "<|tool_list_start|>" in words.template
            or words.vocabulary >= {START, END}
        ),
        framing=(START, END),
        sections=(Section(START, END),),
        grammar=CallGrammar(python_call, START, start=f"{START}[", end=f"]{END}", between=", "),
        call_text=python_text,
    ),
    ModelFormat(
        matches=lambda words: CALLS in words.template,
        thinking=("<think>", "</think>"),
        sections=(Section(CALLS, CALLS_END),),
        grammar=CallGrammar(python_call, CALLS, start=CALLS, end=CALLS_END, between="\n"),
    ),
)
