"""Reads and writes JSON whose numbers keep the digits that were written.

A double holds neither 2^64 + 1 nor 0.10000000000000000555, and Python writes 1E5 as 100000.0.
With other digits, the model would see other tokens than those of its own turn.
"""

import json
import re
import secrets
from typing import Any, Final

_MARK: Final = secrets.token_hex(16)  # prefix of digits that pass through `json.dumps` as a string
_MARKED: Final = re.compile(f'"{_MARK}([^"]*)"')
_INTEGER_CHARS_MAX: Final = 21  # more than any 64-bit integer has


class WrittenNumber(float):
    """A number that exceeds 64 bits or that Python writes with other digits. Immutable."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class WrittenObject(dict[str, Any]):
    """A JSON object of plain numbers, with its text as it was written."""

    def __init__(self, value: dict[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text


def loads(text: str, **options: Any) -> Any:
    """Return the JSON in `text`, as `json.loads` does, with WrittenNumbers where needed."""
    return json.loads(text, parse_int=_number, parse_float=_number, **options)


def object_or_text(text: str, loads: Any = json.loads) -> dict[str, Any] | str:
    """Return the JSON object that `loads` finds in `text`, or `text` if it is none."""
    try:
        value = loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def dumps(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as the `tojson` filter of transformers does, with the digits as written."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    text = json.dumps(_marked(value), ensure_ascii=ensure_ascii, **options)
    return _MARKED.sub(r"\1", text)


def _number(text: str) -> int | float:
    is_integer = text.lstrip("-").isdigit()
    value = int(text[:_INTEGER_CHARS_MAX]) if is_integer else float(text)
    is_held = not is_integer or -(2**63) <= value < 2**64
    return value if is_held and repr(value) == text else WrittenNumber(text)


def _marked(value: Any) -> Any:
    if isinstance(value, WrittenNumber):
        return _MARK + value.text
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    return [_marked(item) for item in value] if isinstance(value, list) else value
