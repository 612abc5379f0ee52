"""The form of Muse: messages to itself, to the user or to a tool, which hold `<atem:invoke>`.

     to=self<|message|>...<|eom|><|start|>assistant to=NAME<|message|><atem:function_calls>...

The prompt ends with `<|start|>assistant`.
"""

from dataclasses import replace
from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    message_grammar,
    tag_form,
    tagged,
)

START, END = "<atem:function_calls>", "</atem:function_calls>"
MESSAGE, MESSAGE_END, NEXT = "<|message|>", "<|eom|>", "<|start|>assistant"
FORM = tag_form(
    ('<atem:invoke name="', '">\n'),
    ('<atem:parameter name="', '">'),
    "</atem:parameter>",
    "</atem:invoke>",
    has_lines=True,
)
_WHOLE: Final = replace(FORM, name=(f"{START}\n{FORM.name[0]}", FORM.name[1]), behind=f"\n{END}")
FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        thinking=(f"to=self{MESSAGE}", MESSAGE_END),
        # Thinking may go over into another message without any end.
        framing=(
            f" to={{name}}{MESSAGE}",
            f"to={{name}}{MESSAGE}",
            NEXT,
            "<|start|>",
            MESSAGE,
            MESSAGE_END,
            START,
            END,
        ),
        # What needs NUL behind it matches only where the answer is cut off: a tag's beginning.
        header=regex.compile(
            r"\s*+(?:(?:to=(?!self<)[^\s<]++\s*+)?+<\|message\|>|</?+atem:[^<>]*+\x00)"
        ),
        sections=(Section(START, END), Section("<atem:invoke", END, is_head=True)),
        form=FORM,
        messages=message_grammar(
            CallGrammar(tagged(_WHOLE), START, between=f"{MESSAGE_END}{NEXT}"),
            thinking=(" to=", f"self{MESSAGE}", MESSAGE_END),
            behind=NEXT,
            final=(f" to=user{MESSAGE}", ""),
            to=(" to=", MESSAGE),
        ),
        part_ends=(MESSAGE_END,),
    ),
)
