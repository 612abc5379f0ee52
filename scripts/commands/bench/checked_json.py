"""Reads a JSON file that anybody may have written into dataclasses of plain fields.

What it returns can be computed with and shown: numbers are finite and of a size that means
something, texts have no characters that steer a terminal or turn the direction of writing.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, get_type_hints

NUMBER_MAX: Final = 1e15  # a petabyte; sums and ratios of such numbers stay finite
TEXT_CHARS_MAX: Final = 10_000
_SHOWN_CHARS: Final = 40  # of what is wrong, in an error
_STEERING: Final = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

Made = TypeVar("Made")


def read_object(path: Path, bytes_max: int) -> dict[str, Any]:
    """Return the one object of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, or no JSON object.
    """
    with path.open("rb") as file:
        raw = file.read(bytes_max + 1)
    if len(raw) > bytes_max:
        raise ValueError(f"it has more than {bytes_max >> 20} MiB")
    try:
        return checked_object(json.loads(raw, parse_constant=_refuse), "it")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def checked_object(told: object, what: str) -> dict[str, Any]:
    """Return `told`, which is a JSON object.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(told, dict):
        raise ValueError(f"{what} is no JSON object")
    return told


def made(kind: type[Made], told: object, what: str) -> Made:
    """Return the dataclass `kind` of an object that has its fields, and no others.

    Raises:
        ValueError: it has not, or a value is of another type.
    """
    given = checked_object(told, what)
    known = _readers(kind)  # type: ignore[arg-type]
    if odd := sorted(given.keys() - known.keys()):
        raise ValueError(f"{what} has {_brief(odd[0])}, which nobody knows")
    needed = {each.name for each in fields(kind) if _is_needed(each)}  # type: ignore[arg-type]
    if absent := sorted(needed - given.keys()):
        raise ValueError(f"{what} has no {absent[0]}")
    return kind(**{name: known[name](value, f"{what}: {name}") for name, value in given.items()})


def is_number(value: object) -> bool:
    """Return whether a value is a number that can be computed with and shown."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and abs(value) <= NUMBER_MAX  # type: ignore[arg-type]


def shown_text(text: str) -> str:
    """Return a text without characters that steer a terminal, or that UTF-8 does not have."""
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", text)


# ---------------------------------------------------------------- one field


def read_text(value: object, what: str) -> str:
    if not isinstance(value, str) or len(value) > TEXT_CHARS_MAX:
        raise ValueError(f"{what} is no text of {TEXT_CHARS_MAX:,} characters at most")
    return shown_text(value)


def read_whole(value: object, what: str) -> int:
    if not isinstance(value, int) or not is_number(value) or value < 0:
        raise ValueError(f"{what} is {_brief(value)}, and no count")
    return value


def _read_number(value: object, what: str) -> float:
    if not isinstance(value, int | float) or not is_number(value):
        raise ValueError(f"{what} is {_brief(value)}, and no number up to {NUMBER_MAX:g}")
    return value


def _read_flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{what} is neither true nor false")
    return value


def _read_texts(value: object, what: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{what} is no list")
    return tuple(read_text(each, what) for each in value)


def _read_numbers(value: object, what: str) -> dict[str, float]:
    told = checked_object(value, what)
    return {read_text(name, what): _read_number(each, what) for name, each in told.items()}


_READERS: Final[dict[Any, Callable[[object, str], Any]]] = {
    str: read_text,
    int: read_whole,
    float: _read_number,
    bool: _read_flag,
    tuple[str, ...]: _read_texts,
    Mapping[str, float]: _read_numbers,
}


@cache
def _readers(kind: type) -> dict[str, Callable[[object, str], Any]]:
    """Return what reads each plain field; those of other dataclasses the caller reads."""
    hints = get_type_hints(kind).items()
    return {name: _READERS[hint] for name, hint in hints if hint in _READERS}


def _is_needed(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it has {constant}, which is no number")


def _brief(value: object) -> str:
    if isinstance(value, int) and not -NUMBER_MAX <= value <= NUMBER_MAX:
        return "too large"
    return ascii(value)[:_SHOWN_CHARS]
