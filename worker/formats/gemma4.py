"""The form of Gemma 4: `call:f{key:value}` between marks, strings between marks of their own."""

from hearth.worker.constraint.bare_keys_grammar import BareKeys
from hearth.worker.constraint.call_grammars import CallGrammar
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.tool_calls.call_parser import Section

START, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template and END in words.template,
        sections=(Section(START, END, quote=QUOTE),),
        grammar=CallGrammar(BareKeys(START, END, QUOTE, nests=True), START),
    ),
)
