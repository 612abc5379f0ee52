"""The form of Muse: `<atem:invoke name="f">` in one section."""

from hearth.worker.constraint.call_grammars import CallGrammar, tagged
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.tool_calls.call_parser import Section
from hearth.worker.stream.tool_calls.tag_form import tag_form

START, END = "<atem:function_calls>", "</atem:function_calls>"
FORM = tag_form(
    ('<atem:invoke name="', '">\n'),
    ('<atem:parameter name="', '">'),
    "</atem:parameter>",
    "</atem:invoke>",
)
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        sections=(Section(START, END),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), START, start=f"{START}\n", end=f"\n{END}"),
    ),
)
