"""The form of Functionary 3.1: `<function=f>` around an object in JSON."""

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    json_call,
)

FORMATS = (
    ModelFormat(
        is_of=lambda words: "<function=" in words.template and "</function>" in words.template,
        rank=7,
        sections=(Section("<function=", "</function>", is_head=True),),
        grammar=CallGrammar(json_call("<function=", ">", "</function>"), "<function=", between=""),
    ),
)
