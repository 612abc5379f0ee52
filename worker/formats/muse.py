"""The format of Muse: messages to itself, to the user, or to a tool, with `<atem:invoke>`.

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
_WHOLE: Final = replace(
    FORM, name=(f"{START}\n{FORM.name[0]}", FORM.name[1]), after_call=f"\n{END}"
)
FORMATS = (
    ModelFormat(
        matches=lambda words: START in words.template,
        thinking=(f"to=self{MESSAGE}", MESSAGE_END),
        # Another message may begin within thinking, without an end mark before it.
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
        # The part with NUL can only match partially, where an answer is cut off in a tag.
        header=regex.compile(
            r"\s*+(?:(?:to=(?!self<)[^\s<]++\s*+)?+<\|message\|>|</?+atem:[^<>]*+\x00)"
        ),
        sections=(Section(START, END), Section("<atem:invoke", END, is_head=True)),
        form=FORM,
        messages=message_grammar(
            CallGrammar(tagged(_WHOLE), START, between=f"{MESSAGE_END}{NEXT}"),
            thinking=(" to=", f"self{MESSAGE}", MESSAGE_END),
            after_thinking=NEXT,
            final=(f" to=user{MESSAGE}", ""),
            to=(" to=", MESSAGE),
        ),
        part_ends=(MESSAGE_END,),
    ),
)
