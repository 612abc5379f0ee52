"""The forms of DeepSeek V3, R1 and V3.1: a name and JSON, each call between marks of its own."""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    json_call,
    marked_calls,
)

START, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, BEHIND_NAME = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_HEAD: Final = regex.compile(
    r"(?:function<｜tool▁sep｜>)?+(?P<name>[^\s<>{}｜]++)\s*+(?:<｜tool▁sep｜>)?+\s*+"
    r"(?:```(?:json)?+\s*+)?+(?=\{)"
)
_READ: Final = marked_calls(CALL, _HEAD, CALL_END, END)
_SECTIONS: Final = (Section(START, read=_READ), Section(CALL, read=_READ))
RESULT, RESULT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template and "```json" in words.template,
        sections=_SECTIONS,
        grammar=CallGrammar(
            json_call(f"{CALL}function{BEHIND_NAME}", "\n```json\n", f"\n```{CALL_END}"),
            START,
            start=START,
            end=END,
            between="\n",
        ),
        result=(f"<｜tool▁outputs▁begin｜>{RESULT}", f"{RESULT_END}<｜tool▁outputs▁end｜>"),
    ),
    ModelFormat(
        is_of=lambda words: START in words.template,
        rank=1,
        sections=_SECTIONS,
        grammar=CallGrammar(
            json_call(CALL, BEHIND_NAME, CALL_END), START, start=START, end=END, between=""
        ),
        result=(RESULT, RESULT_END),
    ),
)
