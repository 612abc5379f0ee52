"""The form of Kimi K3: thinking, response, calls and arguments are parts, opened and closed.

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
START, END = f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}"
RESPONSE, RESPONSE_END = f"{OPEN}response{SEP}", f"{CLOSE}response{SEP}"
MESSAGE_END: Final = f"{CLOSE}message{SEP}"
CALL: Final = f"{OPEN}call "
KINDS: Final = ("string", "number", "boolean", "object", "array", "null")  # text, and JSON
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
        is_of=lambda words: words.vocabulary >= {OPEN, CLOSE, SEP, "<|end_of_msg|>"},
        thinking=(f"{OPEN}think{SEP}", f"{CLOSE}think{SEP}"),
        framing=(OPEN, CLOSE, SEP, RESPONSE, RESPONSE_END, START, END, CALL),
        header=regex.compile(r"(?<=<\|(?:open|close)\|>)\w*+(?: \w++=\"[^\"<>]*+\")*+<\|sep\|>"),
        sections=(Section(START, END), Section(CALL, END, is_head=True)),
        form=FORM,
        messages=message_grammar(
            CallGrammar(tagged(FORM), START, start=START, end=f"{END}{MESSAGE_END}", between=""),
            thinking=(OPEN, f"think{SEP}", f"{CLOSE}think{SEP}"),
            behind="",
            final=("", f"{RESPONSE_END}{MESSAGE_END}"),
            opens=RESPONSE,
            skipped=RESPONSE_END,
        ),
        part_ends=(OPEN, CLOSE, SEP),
    ),
)
