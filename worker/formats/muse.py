"""The form of Muse: `<atem:invoke name="f">` in one section."""

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    tag_form,
    tagged,
)

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
