"""The forms of ERNIE 4.5 and Ling 2: Hermes', which ERNIE parts by empty lines."""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    LAST,
    CallGrammar,
    ModelFormat,
    Section,
    json_call,
)

_SHOWN: Final = regex.compile(r"<tool_call>(?:\\n|\n)\{\\?+\"name")
_SECTIONS: Final = (Section("<tool_call>", "</tool_call>"),)
_CALL: Final = json_call('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")
FORMATS = (
    ModelFormat(
        is_of=lambda words: bool(_SHOWN.search(words.template)) and "</response>" in words.template,
        rank=LAST - 2,
        framing=("<response>", "</response>"),
        part_ends=("</response>",),
        sections=_SECTIONS,
        grammar=CallGrammar(_CALL, "<tool_call>", between="\n\n"),
    ),
    ModelFormat(
        is_of=lambda words: bool(_SHOWN.search(words.template)),
        rank=LAST - 1,
        sections=_SECTIONS,
        grammar=CallGrammar(_CALL, "<tool_call>"),
    ),
)
