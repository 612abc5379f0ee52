"""Parses clients' JSON once, and refuses values that the worker or a cloud could not carry."""

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
VALUES_MAX: Final = 1_000_000  # orjson parses this many in 0.6 s, while nothing else runs
SLICE_BYTES: Final = 1024 * 1024  # bytes of a body, searched in one C call
_LONG_NUMBER: Final = b"0" * 19  # the shortest run of digits that may exceed 64 bits
_DIGITS: Final = bytes(48 if chr(octet) in "0123456789" else 32 for octet in range(256))
_MINUS_ZEROS: Final = (
    b"-0,",
    b"-0]",
    b"-0}",
    b"-0\n",
)  # plain searches, ten times as fast as a regex
_ARGUMENTS: Final = ("arguments", "input")  # fields of a tool call
_HIGH, _LOW = rb"[89abAB][0-9a-fA-F]{2}", rb"[c-fC-F][0-9a-fA-F]{2}"  # the digits after \ud
_LONE: Final = re.compile(
    rb"\\u[dD](?:%b(?!\\u[dD]%b)|%b(?<!\\u[dD]%b\\u[dD]%b))" % (_HIGH, _LOW, _LOW, _HIGH, _LOW)
)
_KINDS: Final = {list: "array", str: "string", bool: "boolean", type(None): "null"}
_BACKSLASH: Final = rb"\\"  # a backslash as JSON writes it
_HIDDEN: Final = b"\xff"  # never occurs in UTF-8


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in `body`; the escape of a lone surrogate is read as U+FFFD.

    JavaScript's slice() cuts surrogate pairs apart, and the halves stay in a client's history.

    Raises:
        RequestError: not JSON (the text says where), not an object, NaN or Infinity, an integer
            beyond 64 bits outside of the history's tool calls, nested deeper than DEPTH_MAX, or
            more than VALUES_MAX values.
    """
    body = body.removeprefix(codecs.BOM_UTF8)  # .NET and PowerShell write a BOM
    _check_count(body)  # first, as parsing 30 million values takes seconds and gigabytes
    try:
        value = _object(orjson.loads(body))
        if _may_lose(body, value.get("messages")):
            value = _carried(_exact(body))
    except orjson.JSONDecodeError:  # perhaps a lone surrogate, or a number beyond a double
        value = _carried(_exact(_mended(body)))
    return value


def parse_argument(text: str) -> dict[str, Any] | None:
    """Return the object in a tool call's argument string; None if the string holds none.

    The object is a WrittenObject if Python would write the numbers with other digits.
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
    hidden = body.replace(_BACKSLASH, _HIDDEN)  # now each backslash left begins an escape
    return _LONE.sub(rb"\\ufffd", hidden).replace(_HIDDEN, _BACKSLASH)


def _exact(body: bytes) -> dict[str, Any]:
    """Return the object in `body` with the digits as written. Raises: RequestError."""
    try:
        value = written_numbers.loads(body.decode(), parse_constant=int)  # int() refuses NaN
    except (ValueError, RecursionError) as error:
        problem: Exception = error
        try:
            orjson.loads(body)
        except orjson.JSONDecodeError as precise:  # orjson's text is more precise
            problem = precise
        raise RequestError(f"The body is not valid JSON: {problem}.", code="invalid_json") from None
    return _object(value)


def _object(value: Any) -> dict[str, Any]:
    """Return `value`. Raises: RequestError: it is not an object, or it is nested too deep."""
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
    """Return whether parsing `body` into `value` may have lost digits or a long integer.

    orjson reads an integer beyond 64 bits as a float. Long runs of digits are found by plain
    searches, ten times as fast as a regex, in overlapping slices that let the event loop run.
    """
    slices = (
        body[start : start + SLICE_BYTES + len(_LONG_NUMBER)].translate(_DIGITS)
        for start in range(0, len(body), SLICE_BYTES)
    )
    floats = (type(item) is float for level in _levels(value) for item in level)
    has_long_number = any(_LONG_NUMBER in digits for digits in slices)
    return has_long_number or any(zero in body for zero in _MINUS_ZEROS) or any(floats)


def _carried(value: Any, is_history: bool = False, *, is_bounded: bool = True) -> Any:
    """Return exact JSON with floats, except in arguments of the history's tool calls.

    Raises:
        RequestError: `is_bounded`, and a number elsewhere is beyond 64 bits.
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
    """Return a call's arguments with floats; as a WrittenObject if that changes their text."""
    found, text = _carried(value, is_bounded=False), written_numbers.dumps(value)
    is_plain = type(value) is not dict or text == written_numbers.dumps(found)
    return found if is_plain else WrittenObject(found, text)


def _check_count(body: bytes) -> None:
    """Refuse a body of too many values before it is parsed. Raises: RequestError."""
    if body.count(b",") + body.count(b"{") + body.count(b"[") < VALUES_MAX:
        return  # the sum is an upper bound: it counts within strings too
    if (count := json_values(body)) > VALUES_MAX:
        raise RequestError(
            f"The body holds {count:,} JSON values and this server accepts {VALUES_MAX:,}. "
            f"Remove at least {count - VALUES_MAX:,}.",
            code="invalid_json",
        )


def json_values(text: bytes) -> int:
    """Return how many values the JSON `text` holds, without parsing it.

    There is one more value than there are commas, nonempty lists and nonempty objects.
    """
    outside = b"".join(_outside_strings(text)).translate(None, b" \t\r\n")
    opened = outside.count(b"{") + outside.count(b"[")
    empty = outside.count(b"{}") + outside.count(b"[]")
    return 1 + outside.count(b",") + opened - empty


def _outside_strings(text: bytes) -> Iterator[bytes]:
    """Yield the JSON text slice by slice, with each string reduced to a quote."""
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
    """Return how many values parsed JSON holds, `value` itself included."""
    return sum(map(len, _levels(value)))


def _levels(value: Any) -> Iterator[list[Any]]:
    """Yield the values of parsed JSON level by level, from `value` itself down."""
    level = [value]
    while level:
        yield level
        nodes = (node for node in level if isinstance(node, (dict, list)))
        inner = (node.values() if isinstance(node, dict) else node for node in nodes)
        level = [*itertools.chain.from_iterable(inner)]
