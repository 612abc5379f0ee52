"""The format of Kimi K3: marks open and close thinking, response, each call and each argument.

...<|close|>think<|sep|><|open|>response<|sep|>...<|close|>response<|sep|>
<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>...
"""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    NUMBER,
    CallGrammar,
    ModelFormat,
    Section,
    TagForm,
    message_grammar,
    tagged,
)

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
START, END, CALL = f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}", f"{OPEN}call "
RESPONSE, RESPONSE_END = f"{OPEN}response{SEP}", f"{CLOSE}response{SEP}"
THINK_END, MESSAGE_END = f"{CLOSE}think{SEP}", f"{CLOSE}message{SEP}"
KINDS: Final = ("string", "number", "boolean", "object", "array", "null")  # the first is text
_PART: Final = r"<\|open\|>{} (?:[^<>]*? )??{}=\"(?P<{}>[^\"<>]*+)\""
FORM = TagForm(
    name=(f'{CALL}tool="', '" index="', NUMBER, f'"{SEP}'),
    key=(f'{OPEN}argument key="', '" type="'),
    typed=tuple(f'{kind}"{SEP}' for kind in KINDS),
    value_end=f"{CLOSE}argument{SEP}",
    call_end=f"{CLOSE}call{SEP}",
    head=regex.compile(_PART.format("call", "tool", "name") + r"[^<>]*+<\|sep\|>"),
    opens=regex.compile(
        _PART.format("argument", "key", "key") + r"(?: type=\"(?P<text>\w*+)\")?+[^<>]*+<\|sep\|>"
    ),
    begins=f"{OPEN}argument ",
    json_opens=regex.compile(r"<\|open\|>json[^<>]*+<\|sep\|>"),
    json_closes=f"{CLOSE}json{SEP}",
)
FORMATS = (
    ModelFormat(
        matches=lambda words: words.vocabulary >= {OPEN, CLOSE, SEP, "<|end_of_msg|>"},
        thinking=(f"{OPEN}think{SEP}", THINK_END),
        framing=(OPEN, CLOSE, SEP, RESPONSE, RESPONSE_END, START, END, CALL, THINK_END),
        header=regex.compile(
            r"(?<=<\|(?:open|close)\|>(?:call )?)"
            r"(?:\w++(?!=) ?)?+(?:\w++=\"[^\"<>]*+\" ?)*+<\|sep\|>"
        ),
        sections=(Section(START, END), Section(CALL, END, is_head=True)),
        form=FORM,
        messages=message_grammar(
            CallGrammar(tagged(FORM), START, start=START, end=f"{END}{MESSAGE_END}", between=""),
            thinking=(OPEN, f"think{SEP}", THINK_END),
            after_thinking="",
            final=("", f"{RESPONSE_END}{MESSAGE_END}"),
            opens=RESPONSE,
            skipped=RESPONSE_END,
        ),
        part_ends=(OPEN, CLOSE, SEP),
    ),
)
