"""Parses clients' JSON once, and refuses what something behind it could not carry."""

import codecs
import functools
import json
import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from hearth.proxy.http.body_threads import work_on_body
from hearth.shared.errors import RequestError

DEPTH_MAX: Final = 100
VALUES_MAX: Final = 1_000_000  # which orjson reads in 0.6 s, and nothing else runs meanwhile
SLICE_BYTES: Final = 1024 * 1024  # of a body that is looked through by one call after the other
_LONG_NUMBER: Final = b"0" * 19  # the shortest run that may pass 64 bits, of any _DIGITS
_DIGITS: Final = bytes(48 if chr(octet) in "0123456789" else 32 for octet in range(256))
_INTEGER_MIN, _INTEGER_MAX = -(2**63), 2**64 - 1
_HIGH, _LOW = rb"[89abAB][0-9a-fA-F]{2}", rb"[c-fC-F][0-9a-fA-F]{2}"  # behind a \ud
_LONE: Final = re.compile(
    rb"\\u[dD](?:%b(?!\\u[dD]%b)|%b(?<!\\u[dD]%b\\u[dD]%b))" % (_HIGH, _LOW, _LOW, _HIGH, _LOW)
)
_BACKSLASH: Final = rb"\\"  # as JSON writes one
_HIDDEN: Final = b"\xff"  # in no UTF-8


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`; an escape of half a character is read as U+FFFD.

    JavaScript's slice() cuts through characters, and what it cut stays in a client's history.

    Raises:
        RequestError: not JSON (the text says where), not an object, NaN or Infinity, an integer
            beyond 64 bits, deeper than DEPTH_MAX, more than VALUES_MAX.
    """
    body = body.removeprefix(codecs.BOM_UTF8)  # which .NET and PowerShell write
    _check_count(body)  # first: to read 30 million values takes seconds and gigabytes
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        value = _mended(body)
    return _checked(value, body)


async def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`, as `parse_object` does; of a large one in a thread."""
    return await work_on_body(len(body), functools.partial(parse_object, body))


def parse_argument(text: str) -> dict[str, Any] | None:
    """Return the object that a tool call's argument string holds; None where it holds none."""
    try:
        body = text.encode()
        _check_count(body)
        return _checked(orjson.loads(body), body)
    except (RequestError, UnicodeEncodeError, orjson.JSONDecodeError):
        return None


def _mended(body: bytes) -> Any:
    """Return the JSON in `body` with its lone surrogates replaced.

    Raises:
        RequestError: it is none even so.
    """
    if _HIDDEN not in body:
        hidden = body.replace(_BACKSLASH, _HIDDEN)  # so that each backslash begins an escape
        body = _LONE.sub(rb"\\ufffd", hidden).replace(_HIDDEN, _BACKSLASH)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _checked(value: Any, body: bytes) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(
            f"The body is a JSON {_kind(value)}; a JSON object is expected.", code="invalid_json"
        )
    _check_nesting(value)  # first: the second look at long numbers would recurse as deep
    _check_integers(body)
    return value


def _check_integers(body: bytes) -> None:
    """orjson reads an integer beyond 64 bits as a float: look again where one may be."""
    if _has_long_number(body):
        json.loads(body, parse_int=_bounded_integer)


def _has_long_number(body: bytes) -> bool:
    """Return whether there are digits enough in a row. A tenth of the time that a pattern takes.

    It looks at one slice after the other, which overlap, for the event loop's sake.
    """
    return any(
        _LONG_NUMBER in body[start : start + SLICE_BYTES + len(_LONG_NUMBER)].translate(_DIGITS)
        for start in range(0, len(body), SLICE_BYTES)
    )


def _bounded_integer(digits: str) -> int:
    if len(digits) > 20 or not _INTEGER_MIN <= int(digits) <= _INTEGER_MAX:
        raise RequestError(
            f"The body holds the integer {digits[:24]}{'...' if len(digits) > 24 else ''}; "
            "allowed are integers of 64 bits.",
            code="invalid_json",
        )
    return int(digits)


def _check_count(body: bytes) -> None:
    """Refuse a body of too many values before it is read. Raises: RequestError."""
    if body.count(b",") + body.count(b"{") + body.count(b"[") < VALUES_MAX:
        return  # the rest would look at what is in strings too
    if (count := json_values(body)) > VALUES_MAX:
        raise RequestError(
            f"The body holds {count:,} JSON values and this server accepts {VALUES_MAX:,}. "
            f"Remove at least {count - VALUES_MAX:,}.",
            code="invalid_json",
        )


def json_values(text: bytes) -> int:
    """Return how many values are in the JSON `text`, counted without reading it.

    Each comma parts two values, and each list and object that is not empty holds one more.
    """
    outside = b"".join(_outside_strings(text)).translate(None, b" \t\r\n")
    opened = outside.count(b"{") + outside.count(b"[")
    empty = outside.count(b"{}") + outside.count(b"[]")
    return 1 + outside.count(b",") + opened - empty


def _outside_strings(text: bytes) -> Iterator[bytes]:
    """Yield what of a JSON text stands outside its strings, and a quote for each, by slices."""
    is_inside, start = False, 0
    while start < len(text):
        end = start + SLICE_BYTES
        while text[end - 1 : end] == b"\\":  # an escape stays in one slice
            end += 1
        parts = text[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b'"' * is_inside + b'"'.join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        start = end


def value_count(value: Any) -> int:
    """Return how many values are in JSON that was read, `value` among them."""
    level, count = [value], 0
    while level:
        count += len(level)
        level = [item for node in level for item in _children(node)]
    return count


def _check_nesting(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH_MAX + 1):
        level = [item for node in level for item in _children(node)]
        if not level:
            return
    raise RequestError(
        f"The body is nested deeper than {DEPTH_MAX} levels; send it flatter.", code="invalid_json"
    )


def _children(node: Any) -> Any:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
