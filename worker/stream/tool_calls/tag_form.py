"""Describes calls written as elements: `<invoke name="f"><parameter name="k">v</parameter>`.

One description serves for writing a call and for reading it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import regex

from hearth.worker.stream.tool_calls.request_tools import RequestTools

MAY_BREAK: Final = "\n?"  # in the marks of a form: a newline may stand here
_ATTRIBUTE: Final = re.compile(r'(.*?) (\w+)="$', re.DOTALL)


@dataclass(frozen=True, slots=True)
class TagForm:
    """The form in which a family of models writes one call. Immutable.

    A call is written with `name` around the tool's name, `key` around a parameter's name up to the
    value, then `value_end`, `call_end` and `after_call`. To read a call, the pattern `head` matches
    its beginning and has the group "name"; `opens` matches the beginning of an argument and has the
    group "key".
    """

    name: tuple[str, ...]
    key: tuple[str, ...]
    value_end: str
    call_end: str  # "" where the mark after all calls ends the call, too
    head: Any
    opens: Any
    begins: str  # common beginning of all matches of `opens`
    after_call: str = ""  # text written after `call_end`
    is_bare: bool = False  # no mark stands before the name
    has_lines: bool = False  # templates end the line after each parameter
    # For tags that name the value's type: the text before a value of text, then the texts before
    # values of JSON. `opens` then has the group "text", "true" or "string" for text.
    typed: tuple[str, ...] = ()
    gap: str = ""  # text before the end of a value of JSON or of fixed choices
    trims_newline: bool = False  # a newline at each end of a value is not part of the value
    guesses_types: bool = False  # values without a type in the schema get the type they look like
    # Makes JSON of an argument whose value may consist of elements. With `unfold`, "{}" in
    # `value_end` stands for the key.
    unfold: Callable[[RequestTools, str, str, str], str] | None = None
    # Patterns around arguments that are one JSON object:
    json_opens: Any = regex.compile(r"(?=\{)")
    json_closes: str = ""


def tag_form(
    name: tuple[str, str], key: tuple[str, ...], value_end: str, call_end: str, **more: Any
) -> TagForm:
    """Return a form with the name and the key in attributes of the tags: `<invoke name="`."""
    begins = _ATTRIBUTE.fullmatch(key[0])
    assert begins, key
    patterns = {"head": _pattern(name[0], "name"), "opens": _pattern(key[0], "key")}
    return TagForm(name, key, value_end, call_end, begins=begins[1], **patterns | more)


def _pattern(tag: str, group: str) -> Any:
    """Return a pattern of a whole tag, which allows other quotes, blanks and attributes."""
    found = _ATTRIBUTE.fullmatch(tag)
    assert found, tag
    value = rf"(?P<{group}>\"[^\"<>\n]*+\"|'[^'<>\n]*+'|[^\s\"'<>|]++)"
    return regex.compile(rf"{re.escape(found[1])}\s*{found[2]}\s*=\s*{value}[^<>]*+>")


def bare_form(start: str, key: str, value: str, end: str) -> TagForm:
    """Return GLM's form: the name stands without a tag, and keys and values are elements."""
    return TagForm(
        name=(start, MAY_BREAK),
        key=(f"<{key}>", f"</{key}>", MAY_BREAK, f"<{value}>"),
        value_end=f"</{value}>",
        call_end="",
        head=regex.compile(r"(?P<name>[^\s<>{}\[\]()\"'=,]++)"),
        opens=regex.compile(
            rf"<{key}>(?P<key>[^<]*+)</{key}>(?:\s|\\n)*+"
            rf"(?:<{value}>|(?=[^<\s\\]))"  # GLM may leave out this tag
        ),
        begins=f"<{key}>",
        is_bare=True,
        guesses_types=True,
        after_call=end,
    )
