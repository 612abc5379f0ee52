"""The form of Seed-OSS: Qwen's, in a section of its own and without newlines around values."""

from dataclasses import replace

from hearth.worker.formats.qwen_xml import TIGHT
from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    tagged,
)

START, END = "<seed:tool_call>", "</seed:tool_call>"
FORM = replace(TIGHT, name=(f"{START}\n<function=", ">\n"), behind=f"\n{END}")
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        rank=6,
        thinking=("<seed:think>", "</seed:think>"),
        sections=(Section(START, END),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), START),
    ),
)
