"""The form of MiniMax M2: `<invoke name="f">` in one section."""

from hearth.worker.constraint.call_grammars import CallGrammar, tagged
from hearth.worker.formats.shared.model_format import ModelFormat
from hearth.worker.stream.tool_calls.call_parser import Section
from hearth.worker.stream.tool_calls.tag_form import tag_form

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
FORM = tag_form(
    ('<invoke name="', '">\n'), ('<parameter name="', '">'), "</parameter>", "</invoke>"
)
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        sections=(Section(START, END),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), START, start=f"{START}\n", end=f"\n{END}"),
    ),
)
