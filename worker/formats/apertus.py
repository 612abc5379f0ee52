"""The form of Apertus: a list of objects whose one key is the tool's name."""

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    Trust,
    json_call,
    json_calls,
)

START, END = "<|tools_prefix|>", "<|tools_suffix|>"
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        thinking=("<|inner_prefix|>", "<|inner_suffix|>"),
        framing=(END,),
        ends=(END,),
        header=regex.compile(r"(?!)"),  # there is none, but a call ends thinking
        sections=(Section(START, read=lambda context: json_calls(context, Trust(is_keyed=True))),),
        grammar=CallGrammar(
            json_call('{"', '": ', "}"), START, start=f"{START}[", end="]", between=", "
        ),
    ),
)
