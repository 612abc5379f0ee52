"""The formats of DeepSeek V3.2, V4, V4.1 and GigaChat 3.5: tags say whether a value is text."""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    TagForm,
    tag_form,
    tagged,
)

MARKS: Final = ("｜DSML｜", "｜｜DSML｜｜", "｜GCML｜")
BLOCKS: Final = (" calls", "function_calls", "tool_calls")  # names in V4.1, V3.2, V4 and GigaChat
# Models also write each other's blocks, doubled bars, misspelt blocks, and calls without a block.
_MISSPELT: Final = (" call", "function_call", "tool_call")
_BETWEEN: Final = ("<|message_sep|>",)  # messages of GigaChat


def _form(tag: str) -> TagForm:
    """Return the form with tags that begin with `tag`: the mark, and a blank in some formats."""
    return tag_form(
        (f'<{tag}invoke name="', '">\n'),
        (f'<{tag}parameter name="',),
        f"</{tag}parameter>",
        f"</{tag}invoke>",
        typed=('" string="true">', '" string="false">'),
        opens=regex.compile(
            rf"<{tag}parameter\s++name\s*+=\s*+\"(?P<key>[^\"<>\n]*+)\""
            r"(?:\s*+string\s*+=\s*+\"(?P<text>true|false)\")?+[^<>]*+>"
        ),
        has_lines=True,
    )


def _format(mark: str, block: str) -> ModelFormat:
    tag = f"{mark} " if block.startswith(" ") else mark
    start, end, form = f"<{mark}{block}>", f"</{mark}{block}>", _form(tag)
    return ModelFormat(
        matches=lambda words: (
            (mark in words.template and f"{block}>" in words.template)
            or (mark in words.vocabulary and block == BLOCKS[1] and not words.template)
        ),
        thinking=("<think>", "</think>"),
        framing=_BETWEEN,
        part_ends=_BETWEEN,
        sections=_SECTIONS,
        form=form,
        grammar=CallGrammar(tagged(form), start, start=f"{start}\n", end=f"\n{end}"),
    )


_SECTIONS: Final = tuple(
    section
    for mark in MARKS
    for section in (
        *(Section(f"<{mark}{block}>", f"</{mark}{block}>") for block in BLOCKS + _MISSPELT),
        Section(f"<{mark} invoke", f"</{mark} calls>", is_head=True),
        Section(f"<{mark}invoke", f"</{mark}tool_calls>", is_head=True),
    )
)
FORMATS = tuple(_format(mark, block) for mark in MARKS for block in BLOCKS)
