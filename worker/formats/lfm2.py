"""The form of LFM2: a list of calls in Python between marks."""

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    python_call,
    python_text,
)

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
FORMATS = (
    ModelFormat(
        is_of=lambda words: (
            START in words.template
            or "<|tool_list_start|>" in words.template
            or words.vocabulary >= {START, END}
        ),
        sections=(Section(START, END),),
        call_text=python_text,
        grammar=CallGrammar(python_call, START, start=f"{START}[", end=f"]{END}", between=", "),
    ),
)
