"""Describes calls that are elements, as `<invoke name="f"><parameter name="k">v</parameter>`.

One description is for both sides: how a call is written, and what is read as one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import regex

from hearth.worker.stream.tool_calls.request_tools import RequestTools

MAY_BREAK: Final = "\n?"  # in a written form: a newline may stand here
_ATTRIBUTE: Final = re.compile(r'(.*?) (\w+)="$', re.DOTALL)


@dataclass(frozen=True, slots=True)
class TagForm:
    """The form in which a family of models writes one call. Immutable.

    What is written: `name` around the tool's name, `key` in front of a parameter's name and all
    behind it up to its value, `value_end`, `call_end`, `behind`. What is read: `head` begins a call
    and has the group "name", `opens` begins an argument and has the group "key".
    """

    name: tuple[str, ...]
    key: tuple[str, ...]
    value_end: str
    call_end: str  # "" where the mark behind calls ends one
    head: Any
    opens: Any
    begins: str  # what every match of `opens` begins with
    behind: str = ""  # is written behind `call_end`
    is_bare: bool = False  # no mark stands in front of the name
    has_lines: bool = False  # templates end a line behind each parameter
    # In front of a value that is text, and what may stand in front of one that is JSON, where the
    # tag tells: then `opens` has the group "text", "true" or "string" in front of text.
    typed: tuple[str, ...] = ()
    gap: str = ""  # between a value that is no text and its end
    trims_newline: bool = False  # one at each end of a value is the form's; all else is the value
    guesses_types: bool = False  # of values whose schema has none
    # Makes JSON of the text of a tool's argument that may be made of elements itself; then the key
    # stands in `value_end` for "{}".
    unfold: Callable[[RequestTools, str, str, str], str] | None = None
    # What may stand around arguments that are one JSON object.
    json_opens: Any = regex.compile(r"(?=\{)")
    json_closes: str = ""


def tag_form(
    name: tuple[str, str], key: tuple[str, ...], value_end: str, call_end: str, **more: Any
) -> TagForm:
    """Return the form whose tags have the name and the key as an attribute: `<invoke name="`."""
    begins = _ATTRIBUTE.fullmatch(key[0])
    assert begins, key
    patterns = {"head": _pattern(name[0], "name"), "opens": _pattern(key[0], "key")}
    return TagForm(name, key, value_end, call_end, begins=begins[1], **patterns | more)


def _pattern(tag: str, group: str) -> Any:
    """Return what reads a tag up to its end, also with other quotes, blanks and attributes."""
    found = _ATTRIBUTE.fullmatch(tag)
    assert found, tag
    value = rf"(?P<{group}>\"[^\"<>\n]*+\"|'[^'<>\n]*+'|[^\s\"'<>|]++)"
    return regex.compile(rf"{re.escape(found[1])}\s*{found[2]}\s*=\s*{value}[^<>]*+>")


def bare_form(start: str, key: str, value: str, end: str) -> TagForm:
    """Return the form whose name stands alone, and whose keys and values are elements: GLM's."""
    return TagForm(
        name=(start, MAY_BREAK),
        key=(f"<{key}>", f"</{key}>", MAY_BREAK, f"<{value}>"),
        value_end=f"</{value}>",
        call_end="",
        head=regex.compile(r"(?P<name>[^\s<>{}\[\]()\"'=,]++)"),
        opens=regex.compile(
            rf"<{key}>(?P<key>[^<]*+)</{key}>(?:\s|\\n)*+"
            rf"(?:<{value}>|(?=[^<\s\\]))"  # which GLM may leave out
        ),
        begins=f"<{key}>",
        is_bare=True,
        guesses_types=True,
        behind=end,
    )
