"""The format of Inkling: messages of thinking, of text, or of one call as an object in JSON.

    <|content_thinking|>...<|end_message|><|message_model|>NAME<|content_invoke_tool_json|>{}

The prompt ends with `<|message_model|>`.
"""

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
FORMATS = (
    ModelFormat(
        matches=lambda words: words.vocabulary >= {CALL, END, NEXT},
        thinking=(THINK, END),
        framing=(NEXT, END, TEXT, CALL, "<|content_xml|>", "<|content_invoke_tool_text|>"),
        # The part with NUL can only match partially, where an answer is cut off in a call.
        header=regex.compile(
            r"(?:\A|(?<=<\|message_model\|>))[^\s<>]++(?=<\|content_invoke)"
            r"|(?<=<\|content_invoke_tool_json\|>)[^<]*+\x00"
        ),
        sections=(Section(CALL, END),),
        messages=message_grammar(
            CallGrammar(
                json_call(f'{CALL}{{"name":"', '","args":', f"}}{END}"), CALL, between=NEXT
            ),
            thinking=("", THINK, END),
            after_thinking=NEXT,
            final=(TEXT, END),
            to=("", ""),
        ),
        part_ends=(END,),
    ),
)
