"""The form of MiniCPM5: `<function name="f"><param name="k">`, which nothing stands around."""

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    tag_form,
    tagged,
)

FORM = tag_form(('<function name="', '">'), ('<param name="', '">'), "</param>", "</function>")
FORMATS = (
    ModelFormat(
        is_of=lambda words: all(mark in words.template for mark in (FORM.name[0], FORM.key[0])),
        sections=(Section("<function name=", "</function>", is_head=True),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), "<function name="),
    ),
)
