"""The formats of Functionary: 3.1's `<function=f>` around JSON, and 3.2's messages `>>>f`."""

import regex

from hearth.worker.formats.glm import GLM_4
from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    json_call,
    marked_calls,
)

NEXT, HEAD = ">>>", regex.compile(r"(?P<name>[\w.-]++)\n\s*+(?=\{)")
FORMATS = (
    ModelFormat(  # prompts of this format end with the first mark
        matches=lambda words: f"{NEXT}all" in words.template,
        framing=(f"{NEXT}all\n",),
        header=regex.compile(r"all\n"),
        sections=(*GLM_4.sections, Section(NEXT, read=marked_calls(NEXT, HEAD, "", ""))),
        grammar=CallGrammar(json_call("", "\n", ""), "", between=NEXT),
    ),
    ModelFormat(
        matches=lambda words: "<function=" in words.template and "</function>" in words.template,
        rank=7,
        sections=(Section("<function=", "</function>", is_head=True),),
        grammar=CallGrammar(json_call("<function=", ">", "</function>"), "<function=", between=""),
    ),
)
