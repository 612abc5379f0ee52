"""The format of Qwen3-Coder, Qwen3.5, Step 3.5, Nemotron 3, MiMo V2, Seed-OSS: `<function=f>`."""

from dataclasses import replace

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
    after_call="\n</tool_call>",
    head=regex.compile(r"<(?P<tag>function|parameter)\s*=\s*(?P<name>[^\s<>]++)\s*(?:>|(?=<))"),
    opens=regex.compile(r"<parameter=\s*(?P<key>[^\s<>]++)\s*>"),
    begins="<parameter=",
    trims_newline=True,
)
TIGHT = replace(FORM, key=("<parameter=", ">"), gap="", trims_newline=False)
_TIGHT_SHOWN = regex.compile(r"<tool_call>\\?n?\s*+<function=\w++>\\?n?\s*+<parameter=\w++>[^\\\s]")
START, END = "<seed:tool_call>", "</seed:tool_call>"
SEED = replace(TIGHT, name=(f"{START}\n<function=", ">\n"), after_call=f"\n{END}")
FORMATS = (
    ModelFormat(
        matches=lambda words: (
            "<tool_call>\n<function=" in words.template.replace("\\n", "\n")
            and not _TIGHT_SHOWN.search(words.template)
        ),
        rank=5,
        sections=(Section("<tool_call>", "</tool_call>"),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), "<tool_call>"),
    ),
    ModelFormat(
        matches=lambda words: bool(_TIGHT_SHOWN.search(words.template)),
        rank=6,
        sections=(Section("<tool_call>", "</tool_call>"),),
        form=TIGHT,
        grammar=CallGrammar(tagged(TIGHT), "<tool_call>"),
    ),
    ModelFormat(
        matches=lambda words: START in words.template,
        rank=6,
        thinking=("<seed:think>", "</seed:think>"),
        sections=(Section(START, END),),
        form=SEED,
        grammar=CallGrammar(tagged(SEED), START),
    ),
)
