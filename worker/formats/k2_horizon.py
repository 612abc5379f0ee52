"""The format of K2 Horizon: elements like GLM's with other names, in one section."""

from dataclasses import replace
from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    bare_form,
    tagged,
)

START, END = "<ifm|tool_calls>", "</ifm|tool_calls>"
CALL, CALL_END = "<ifm|tool_call>", "</ifm|tool_call>"
FORM = replace(
    bare_form(CALL, "ifm|arg_key", "ifm|arg_value", CALL_END),
    opens=regex.compile(
        r"<ifm\|arg_key>(?P<key>[^<]*+)</ifm\|arg_key>\s*+"
        r"(?:<ifm\|arg_type>[^<]*+</ifm\|arg_type>\s*+)?+<ifm\|arg_value>"
    ),
)
_THINKING: Final = tuple(
    (f"<ifm|{tag}>", f"</ifm|{tag}>") for tag in ("think", "think_fast", "think_faster")
)
_ARGUMENT_MARKS: Final = tuple(
    f"<{tag}>"
    for name in ("key", "type", "value")
    for tag in (f"ifm|arg_{name}", f"/ifm|arg_{name}")
)
FORMATS = (
    ModelFormat(
        matches=lambda words: START in words.vocabulary,
        thinking=_THINKING[0],
        more_thinking=_THINKING[1:],
        framing=(START, END, CALL, CALL_END, *_ARGUMENT_MARKS),
        sections=(Section(CALL, CALL_END),),
        form=FORM,
        grammar=CallGrammar(tagged(FORM), CALL, start=f"{START}\n", end=f"\n{END}"),
    ),
)
