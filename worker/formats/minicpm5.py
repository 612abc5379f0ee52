"""The format of MiniCPM5: `<function name="f"><param name="k">`, without marks around calls."""

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
        matches=lambda words: all(mark in words.template for mark in (FORM.name[0], FORM.key[0])),
        sections=(Section("<function name=", "</function>", is_head=True),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), "<function name="),
    ),
)
