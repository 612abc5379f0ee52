"""The form of LongCat: GLM's, with names of its own."""

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    bare_form,
    tagged,
)

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
