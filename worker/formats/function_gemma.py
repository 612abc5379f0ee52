"""The form of FunctionGemma: Gemma 4's with other marks, and nothing within a value."""

from hearth.worker.formats.shared.format_parts import (
    BareKeys,
    CallGrammar,
    ModelFormat,
    Section,
)

START, END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        ends=("<start_function_response>",),
        sections=(Section(START, END, quote=QUOTE),),
        grammar=CallGrammar(BareKeys(START, END, QUOTE, nests=False), START),
    ),
)
