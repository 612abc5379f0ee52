"""The form of MiniMax M2: `<invoke name="f">` in one section."""

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    tag_form,
    tagged,
)

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
FORM = tag_form(
    ('<invoke name="', '">\n'), ('<parameter name="', '">'), "</parameter>", "</invoke>"
)
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        sections=(Section(START, END), Section("<invoke name=", END, is_head=True)),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), START, start=f"{START}\n", end=f"\n{END}"),
    ),
)
