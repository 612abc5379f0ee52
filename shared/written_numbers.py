"""Reads and writes JSON whose numbers keep the digits that were written.

A double holds neither 2^64 + 1 nor 0.10000000000000000555, and Python writes 1E5 as 100000.0: a
model that is shown other digits than it wrote is shown other tokens.
"""

import functools
import json
import re
import secrets
from collections.abc import Callable
from typing import Any, Final

_MARK: Final = secrets.token_hex(16)  # in front of digits on their way through a writer of JSON
_MARKED: Final = re.compile(f'"{_MARK}([^"]*)"')
_INTEGER_CHARS_MAX: Final = 20  # of 64 bits


class WrittenNumber(float):
    """A number that 64 bits do not hold, or Python writes with other digits. Immutable."""

    def __new__(cls, text: str) -> "WrittenNumber":
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str

    def __repr__(self) -> str:
        return self.text


class WrittenObject(dict[str, Any]):
    """A JSON object of doubles, and its text with the digits that were written."""

    def __init__(self, value: dict[str, Any], text: str) -> None:
        super().__init__(value)
        self.text = text


def loads(text: str, **options: Any) -> Any:
    """Return the JSON in `text`, as `json.loads` does, with WrittenNumbers where one is needed."""
    return json.loads(text, parse_int=_integer, parse_float=_fraction, **options)


def keeping(write: Callable[..., str]) -> Callable[..., str]:
    """Return `write`, which makes JSON of its first argument, with the digits of WrittenNumbers."""

    @functools.wraps(write)
    def kept(value: Any, *args: Any, **kwargs: Any) -> str:
        return _MARKED.sub(r"\1", write(_marked(value), *args, **kwargs))

    return kept


@keeping
def dumps(value: Any, **options: Any) -> str:
    """Return `value` as `json.dumps` writes it, in Unicode."""
    return json.dumps(value, ensure_ascii=False, **options)


def _integer(text: str) -> int | WrittenNumber:
    value = int(text) if len(text) <= _INTEGER_CHARS_MAX else 0
    is_plain = str(value) == text and -(2**63) <= value < 2**64
    return value if is_plain else WrittenNumber(text)


def _fraction(text: str) -> float:
    value = float(text)
    return value if repr(value) == text else WrittenNumber(text)


def _marked(value: Any) -> Any:
    if isinstance(value, WrittenNumber):
        return _MARK + value.text
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    return [_marked(item) for item in value] if isinstance(value, list) else value
