"""The form of Muse: messages to itself, to the user or to a tool, which hold `<atem:invoke>`.

     to=self<|message|>...<|eom|><|start|>assistant to=NAME<|message|><atem:function_calls>...

The prompt ends with `<|start|>assistant`.
"""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    Expression,
    Lark,
    ModelFormat,
    Section,
    ToolSchema,
    message_grammar,
    tag_form,
    tagged,
)

START, END = "<atem:function_calls>", "</atem:function_calls>"
MESSAGE, MESSAGE_END, NEXT = "<|message|>", "<|eom|>", "<|start|>assistant"
TO_SELF: Final = f"to=self{MESSAGE}"
FORM = tag_form(
    ('<atem:invoke name="', '">\n'),
    ('<atem:parameter name="', '">'),
    "</atem:parameter>",
    "</atem:invoke>",
    has_lines=True,
)
_ELEMENTS: Final = tagged(FORM)


def write(lark: Lark, tool: ToolSchema) -> Expression:
    return lark.row(f"{START}\n", _ELEMENTS(lark, tool), f"\n{END}")


FORMATS = (
    ModelFormat(
        is_of=lambda words: START in words.template,
        thinking=(TO_SELF, MESSAGE_END),
        framing=(NEXT, "<|start|>", MESSAGE, MESSAGE_END, START, END),
        header=regex.compile(r"\s*+(?:to=(?!self<)[^\s<]++\s*+)?+<\|message\|>"),
        sections=(Section(START, END), Section("<atem:invoke", END, is_head=True)),
        form=FORM,
        messages=message_grammar(
            CallGrammar(write, START, between=f"{MESSAGE_END}{NEXT}"),
            thinking=(" to=", f"self{MESSAGE}", MESSAGE_END),
            behind=NEXT,
            final=(f" to=user{MESSAGE}", ""),
            to=(" to=", MESSAGE),
        ),
        part_ends=(MESSAGE_END,),
    ),
)
