"""The form of LongCat: GLM's, with names of its own."""

from hearth.worker.constraint.call_grammars import CallGrammar, tagged
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.tool_calls.call_parser import Section
from hearth.worker.stream.tool_calls.tag_form import bare_form

START, END = "<longcat_tool_call>", "</longcat_tool_call>"
FORM = bare_form(START, "longcat_arg_key", "longcat_arg_value", END)
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        sections=(Section(START, END),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), START),
    ),
)
