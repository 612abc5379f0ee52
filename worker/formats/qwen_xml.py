"""The form of Qwen3-Coder, Qwen3.5 and later, Step 3.5, MiMo V2, Nemotron 3: `<function=f>`."""

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    TagForm,
    tagged,
)

FORM = TagForm(
    name=("<tool_call>\n<function=", ">\n"),
    key=("<parameter=", ">\n"),
    gap="\n",
    has_lines=True,
    value_end="</parameter>",
    call_end="</function>",
    behind="\n</tool_call>",
    head=regex.compile(r"<(?P<tag>function|parameter)\s*=\s*(?P<name>[^\s<>]++)\s*(?:>|(?=<))"),
    opens=regex.compile(r"<parameter=\s*(?P<key>[^\s<>]++)\s*>"),
    begins="<parameter=",
    trims_newline=True,
)
FORMATS = (
    ModelFormat(
        is_of=lambda words: "<tool_call>\n<function=" in words.template.replace("\\n", "\n"),
        rank=5,
        sections=(Section("<tool_call>", "</tool_call>"),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), "<tool_call>"),
    ),
)
