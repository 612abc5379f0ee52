"""Reads single values of a client's body: a reader returns the value or raises a RequestError.

The error names the field, its value and the allowed values. JSON null counts as absent, as it does
for the official APIs. Booleans are not numbers.
"""

import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from hearth.shared.errors import RequestError

Body = Mapping[str, Any]
T = TypeVar("T")

_SHORT = reprlib.Repr()  # an error text must not repeat megabytes
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def refuse(param: str, value: Any, allowed: str) -> NoReturn:
    """Raise the RequestError for a value that is not allowed."""
    raise RequestError(f"{param} is {_SHORT.repr(value)}; allowed is {allowed}.", param=param)


def number(
    body: Body, name: str, low: float, high: float, param: str | None = None
) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        refuse(param or name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def integer(body: Body, name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is float and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # JavaScript and Lua may print 5 as 5.0
    if type(value) is not int or not low <= value <= high:
        refuse(name, value, f"a whole number from {low} to {high}")
    return value


def _optional(value: Any, kind: type[T], param: str, allowed: str) -> T | None:
    if value is not None and type(value) is not kind:
        refuse(param, value, allowed)
    return value


def optional_boolean(body: Body, name: str) -> bool | None:
    return _optional(body.get(name), bool, name, "true or false")


def boolean(body: Body, name: str, default: bool = False) -> bool:
    value = optional_boolean(body, name)
    return default if value is None else value


def text(body: Body, name: str, param: str | None = None) -> str | None:
    return _optional(body.get(name), str, param or name, "a string")


def some_text(body: Body, name: str, param: str) -> str:
    """Return a string that is required and may be empty."""
    value = text(body, name, param)
    return value if value is not None else refuse(param, value, "a string")


def required_text(body: Body, name: str, param: str) -> str:
    value = text(body, name, param)
    if not value:
        refuse(param, value, "a string that is not empty")
    return value


def json_object(value: Any, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(param, value, "an object")
    return value


def optional_object(body: Body, name: str) -> dict[str, Any]:
    value = body.get(name)
    return {} if value is None else json_object(value, name)


def json_list(value: Any, param: str) -> list[Any]:
    if type(value) is not list:
        refuse(param, value, "a list")
    return value


def json_objects(value: Any, param: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each object of the list `value` with its path, such as "messages[3]"."""
    for index, row in enumerate(json_list(value, param)):
        where = f"{param}[{index}]"
        yield json_object(row, where), where


def optional_list(body: Body, name: str, param: str | None = None) -> list[Any]:
    return _optional(body.get(name), list, param or name, "a list") or []
