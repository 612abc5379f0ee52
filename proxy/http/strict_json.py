"""Parses clients' JSON once, and refuses what something behind it could not carry."""

import codecs
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from hearth.shared import written_numbers
from hearth.shared.errors import RequestError
from hearth.shared.written_numbers import WrittenNumber, WrittenObject

DEPTH_MAX: Final = 100
VALUES_MAX: Final = 1_000_000  # which orjson reads in 0.6 s, and nothing else runs meanwhile
SLICE_BYTES: Final = 1024 * 1024  # of a body that is looked through by one call after the other
_LONG_NUMBER: Final = b"0" * 19  # the shortest run that may pass 64 bits, of any _DIGITS
_DIGITS: Final = bytes(48 if chr(octet) in "0123456789" else 32 for octet in range(256))
_MINUS_ZEROS: Final = (b"-0,", b"-0]", b"-0}", b"-0\n")  # found in a tenth of a pattern's time
_ARGUMENTS: Final = ("arguments", "input")  # of a call, beside its name
_HIGH, _LOW = rb"[89abAB][0-9a-fA-F]{2}", rb"[c-fC-F][0-9a-fA-F]{2}"  # behind a \ud
_LONE: Final = re.compile(
    rb"\\u[dD](?:%b(?!\\u[dD]%b)|%b(?<!\\u[dD]%b\\u[dD]%b))" % (_HIGH, _LOW, _LOW, _HIGH, _LOW)
)
_KINDS: Final = {list: "array", str: "string", bool: "boolean", type(None): "null"}
_BACKSLASH: Final = rb"\\"  # as JSON writes one
_HIDDEN: Final = b"\xff"  # in no UTF-8


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`; an escape of half a character is read as U+FFFD.

    JavaScript's slice() cuts through characters, and what it cut stays in a client's history.

    Raises:
        RequestError: not JSON (the text says where), not an object, NaN or Infinity, an integer
            beyond 64 bits outside of the history's calls, deeper than DEPTH_MAX, more than
            VALUES_MAX.
    """
    body = body.removeprefix(codecs.BOM_UTF8)  # which .NET and PowerShell write
    _check_count(body)  # first: to read 30 million values takes seconds and gigabytes
    try:
        value = _object(orjson.loads(body))
        if _may_lose(body, value.get("messages")):
            value = _carried(_exact(body))
    except orjson.JSONDecodeError:  # of half a character, or of a number that no double holds
        value = _carried(_exact(_mended(body)))
    return value


def parse_argument(text: str) -> dict[str, Any] | None:
    """Return the object that a tool call's argument string holds; None where it holds none.

    It is a WrittenObject where its digits are others than Python writes.
    """
    try:
        body = text.encode()
        _check_count(body)
        value = _object(orjson.loads(body))
        return _arguments(_exact(body)) if _may_lose(body, value) else value
    except (RequestError, UnicodeEncodeError, orjson.JSONDecodeError):
        return None


def _mended(body: bytes) -> bytes:
    """Return the JSON in `body` with its lone surrogates replaced."""
    if _HIDDEN in body:
        return body
    hidden = body.replace(_BACKSLASH, _HIDDEN)  # so that each backslash begins an escape
    return _LONE.sub(rb"\\ufffd", hidden).replace(_HIDDEN, _BACKSLASH)


def _exact(body: bytes) -> dict[str, Any]:
    """Return the object in `body` with the digits that were written. Raises: RequestError."""
    try:
        value = written_numbers.loads(body.decode(), parse_constant=int)  # which refuses NaN
    except (ValueError, RecursionError) as error:
        told: Exception = error
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError as precise:  # which says more
            told = precise
        raise RequestError(f"The body is not valid JSON: {told}.", code="invalid_json") from None
    return _object(value)


def _object(value: Any) -> dict[str, Any]:
    """Return `value`, which is an object and not too deep. Raises: RequestError: it is neither."""
    if not isinstance(value, dict):
        kind = _KINDS.get(type(value), "number")
        raise RequestError(
            f"The body is a JSON {kind}; a JSON object is expected.", code="invalid_json"
        )
    if next(itertools.islice(_levels(value), DEPTH_MAX + 1, None), None):
        raise RequestError(
            f"The body is nested deeper than {DEPTH_MAX} levels; send it flatter.",
            code="invalid_json",
        )
    return value


def _may_lose(body: bytes, value: Any) -> bool:
    """Return whether `value`, read from `body`, may have other digits, or `body` long integers.

    orjson reads an integer beyond 64 bits as a float. Digits enough in a row are found in a tenth
    of a pattern's time, in one slice after the other, which overlap, for the event loop's sake.
    """
    slices = (
        body[start : start + SLICE_BYTES + len(_LONG_NUMBER)].translate(_DIGITS)
        for start in range(0, len(body), SLICE_BYTES)
    )
    floats = (type(item) is float for level in _levels(value) for item in level)
    has_long_number = any(_LONG_NUMBER in each for each in slices)
    return has_long_number or any(each in body for each in _MINUS_ZEROS) or any(floats)


def _carried(value: Any, is_history: bool = False, *, is_bounded: bool = True) -> Any:
    """Return exact JSON with doubles; the arguments of the history's calls keep their digits.

    Raises:
        RequestError: a number elsewhere is beyond 64 bits, where `is_bounded`.
    """
    if type(value) is WrittenNumber:
        text = value.text
        if is_bounded and (math.isinf(value) or (text.lstrip("-").isdigit() and text != "-0")):
            raise RequestError(
                f"The body holds the number {text[:24]}{'...' if len(text) > 24 else ''}; allowed "
                "are numbers of 64 bits, and others in the arguments of calls alone.",
                code="invalid_json",
            )
        return 0 if is_bounded and text == "-0" else float(value)
    if type(value) is list:
        return [_carried(item, is_history, is_bounded=is_bounded) for item in value]
    if type(value) is not dict:
        return value
    given = _ARGUMENTS if is_history and "name" in value else ()
    return {
        key: _arguments(item)
        if key in given
        else _carried(item, is_history or key == "messages", is_bounded=is_bounded)
        for key, item in value.items()
    }


def _arguments(value: Any) -> Any:
    """Return a call's arguments with doubles, and their text where they were written otherwise."""
    found, text = _carried(value, is_bounded=False), written_numbers.dumps(value)
    is_plain = type(value) is not dict or text == written_numbers.dumps(found)
    return found if is_plain else WrittenObject(found, text)


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
    return sum(map(len, _levels(value)))


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values of JSON that was read, by the number of those that they are in."""
    level = [value]
    while level:
        yield level
        nodes = (node for node in level if isinstance(node, (dict, list)))
        inner = (node.values() if isinstance(node, dict) else node for node in nodes)
        level = [*itertools.chain.from_iterable(inner)]
