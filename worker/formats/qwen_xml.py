"""The form of Qwen3-Coder, Qwen3.5 and later, Step 3.5, MiMo V2, Nemotron 3: `<function=f>`."""

from collections.abc import Callable
from dataclasses import replace

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    ModelWords,
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
TIGHT = replace(FORM, key=("<parameter=", ">"), gap="", trims_newline=False)
_IS_TIGHT = regex.compile(r"<parameter=\w++>[^\\\s]")


def _is_of(words: ModelWords) -> bool:
    return "<tool_call>\n<function=" in words.template.replace("\\n", "\n")


def _format(form: TagForm, rank: int, is_of: Callable[[ModelWords], bool]) -> ModelFormat:
    return ModelFormat(
        is_of=is_of,
        rank=rank,
        sections=(Section("<tool_call>", "</tool_call>"),),
        form=form,
        grammar=CallGrammar(tagged(form), "<tool_call>"),
    )


FORMATS = (
    _format(TIGHT, 4, lambda words: _is_of(words) and bool(_IS_TIGHT.search(words.template))),
    _format(FORM, 5, _is_of),
)
