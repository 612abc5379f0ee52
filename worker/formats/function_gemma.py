"""The form of FunctionGemma: Gemma 4's with other marks, and nothing within a value."""

from hearth.worker.constraint.bare_keys_grammar import BareKeys
from hearth.worker.constraint.call_grammars import CallGrammar
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.tool_calls.call_parser import Section

START, END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        sections=(Section(START, END, quote=QUOTE),),
        grammar=CallGrammar(BareKeys(START, END, QUOTE, nests=False), START),
    ),
)
