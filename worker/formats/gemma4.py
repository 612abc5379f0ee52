"""The form of Gemma 4: `call:f{key:value}` between marks, strings between marks of their own."""

from hearth.worker.formats.shared.format_parts import (
    BareKeys,
    CallGrammar,
    ModelFormat,
    Section,
)

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template and END in words.template,
        ends=("<|tool_response>",),
        sections=(Section(START, END, quote=QUOTE),),
        grammar=CallGrammar(BareKeys(START, END, QUOTE, nests=True), START),
    ),
)
