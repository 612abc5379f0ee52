"""The forms of DeepSeek V3.2, V4 and V4.1: elements whose tags say whether a value is text."""

from typing import Final

import regex

from hearth.worker.formats.shared.format_parts import (
    CallGrammar,
    ModelFormat,
    Section,
    TagForm,
    tagged,
)

MARK: Final = "｜DSML｜"
# Models write each other's, doubled bars, and no wrapper.
_TAG: Final = r"<｜++DSML｜++\s*+{}\s++name\s*+=\s*+\"(?P<{}>[^\"<>\n]*+)\""
BLOCKS: Final = ("function_calls", "tool_calls", " calls")  # of V3.2, V4, V4.1
HEADS: Final = (f"<{MARK}invoke", f"<{MARK} invoke")


def _form(gap: str) -> TagForm:
    """Return the form with `gap` behind each mark."""
    return TagForm(
        name=(f'<{MARK}{gap}invoke name="', '">\n'),
        key=(f'<{MARK}{gap}parameter name="',),
        typed=('" string="true">', '" string="false">'),
        value_end=f"</{MARK}{gap}parameter>",
        call_end=f"</{MARK}{gap}invoke>",
        head=regex.compile(_TAG.format("invoke", "name") + r"[^<>]*+>"),
        opens=regex.compile(
            _TAG.format("parameter", "key")
            + r"(?:\s*+string\s*+=\s*+\"(?P<text>true|false)\")?+[^<>]*+>"
        ),
        begins=f"<{MARK}{gap}parameter",
        has_lines=True,
    )


def _format(block: str) -> ModelFormat:
    gap = " " if block.startswith(" ") else ""
    start, end, form = f"<{MARK}{block}>", f"</{MARK}{block}>", _form(gap)
    sections = [Section(f"<{MARK}{each}>", f"</{MARK}{each}>") for each in BLOCKS]
    sections += [Section(head, end, is_head=True) for head in HEADS]
    return ModelFormat(
        is_of=lambda words: start in words.template or f"{MARK}{block}" in words.template,
        sections=tuple(sections),
        form=form,
        grammar=CallGrammar(tagged(form), start, start=f"{start}\n", end=f"\n{end}"),
    )


FORMATS = tuple(map(_format, BLOCKS))
