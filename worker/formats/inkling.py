"""The form of Inkling: messages of thinking, of text, or of one call as an object in JSON.

    <|content_thinking|>...<|end_message|><|message_model|>NAME<|content_invoke_tool_json|>{}

The prompt ends with `<|message_model|>`.
"""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    json_call,
    message_grammar,
)

CALL, END, NEXT = "<|content_invoke_tool_json|>", "<|end_message|>", "<|message_model|>"
THINK, TEXT = "<|content_thinking|>", "<|content_text|>"
FRAMES: Final = (NEXT, END, TEXT, CALL, "<|content_xml|>", "<|content_invoke_tool_text|>")
FORMATS = (
    ModelFormat(
        is_of=lambda words: words.vocabulary >= {CALL, END, NEXT},
        thinking=(THINK, END),
        framing=FRAMES,
        header=regex.compile(r"(?:\A|(?<=<\|message_model\|>))[^\s<>]++(?=<\|content_invoke)"),
        sections=(Section(CALL, END),),
        messages=message_grammar(
            CallGrammar(
                json_call(f'{CALL}{{"name":"', '","args":', f"}}{END}"), CALL, between=NEXT
            ),
            thinking=("", THINK, END),
            behind=NEXT,
            final=(TEXT, END),
            to=("", ""),
        ),
        part_ends=(END,),
    ),
)
