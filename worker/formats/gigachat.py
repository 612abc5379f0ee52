"""The forms of GigaChat 3 and 3.1: JSON in a message of its own, or behind a mark."""

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    json_call,
)

ROLE, NEXT, CALL = "function call<|role_sep|>", "<|message_sep|>", "<|function_call|>"
SECTIONS = (Section(ROLE, NEXT), Section(CALL, NEXT))
WRITE = json_call('{"name": "', '", "arguments": ', "}")
FORMATS = (
    ModelFormat(
        is_of=lambda words: CALL in words.template,
        framing=(NEXT,),
        part_ends=(NEXT,),
        sections=SECTIONS,
        grammar=CallGrammar(WRITE, CALL, start=CALL, is_single=True),
    ),
    ModelFormat(
        is_of=lambda words: "<|role_sep|>" in words.template and "function call" in words.template,
        rank=1,
        framing=(NEXT,),
        part_ends=(NEXT,),
        sections=SECTIONS,
        grammar=CallGrammar(WRITE, ROLE, start=f"{NEXT}\n\n{ROLE}\n", is_single=True),
    ),
)
