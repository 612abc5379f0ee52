"""Bodies are parsed once; what could not be carried further is refused, and the text says why."""

import asyncio
import json
import threading
from typing import Any
from unittest import mock

import orjson
import pytest
from hypothesis import given, strategies as st

from hearth.proxy.http import http_exchange, strict_json
from hearth.proxy.http.http_exchange import BodyBudget, HttpExchange
from hearth.proxy.http.strict_json import (
    DEPTH_MAX,
    json_values,
    parse_argument,
    parse_object,
    value_count,
)
from hearth.shared.errors import RequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab\\",[]{}: é'),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='a\\",[{', max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


def refusal(body: bytes) -> str:
    with pytest.raises(RequestError) as caught:
        parse_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    return str(caught.value)


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


def test_broken_json_is_located() -> None:
    assert "line 2 column 5" in refusal(b'{"a":\n"b" c}')


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "array"),
        (b'"x"', "string"),
        (b"true", "boolean"),
        (b"null", "null"),
        (b"1.5", "number"),
        (b'{"a": NaN}', "not valid JSON"),
        (b'{"a": -Infinity}', "not valid JSON"),
        (b'{"a": "\\ud800", "b": NaN}', "not valid JSON"),
        (b'{"a": "\\ud800", "b": 1e999}', "64 bits"),
        (b'{"a": "\\ud800", "b": 18446744073709551616}', "64 bits"),
        (b'["\\ud800"]', "array"),
        (b'{"a": "\\ud80"}', "not valid JSON"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\\ud800\xff\\\\\xff"}', "not valid JSON"),
        (b'{"a": "\\ud800\xed\xa0\x80"}', "not valid JSON"),
        (b'{"a": 18446744073709551616}', "64 bits"),
        (b'{"a": -9223372036854775809}', "64 bits"),
        (b'{"a": 1' + b"0" * 200 + b"}", "64 bits"),
        (b'{"a": 1e999}', "64 bits"),
    ],
)
def test_what_cannot_be_carried_is_refused(body: bytes, word: str) -> None:
    assert word in refusal(body)


@pytest.mark.parametrize("body", [b'{"a": 18446744073709551615}', b'{"a": -9223372036854775808}'])
def test_the_ends_of_64_bits_pass(body: bytes) -> None:
    assert parse_object(body) == json.loads(body)


@given(st.integers(0, 70), st.integers(15, 25), st.integers(20, 40))
def test_a_long_number_is_seen_wherever_a_slice_ends(before: int, digits: int, size: int) -> None:
    body = b'{"a":' + b" " * before + b"9" * digits + b"}"
    with mock.patch.object(strict_json, "SLICE_BYTES", size):
        if digits >= 20:
            assert "64 bits" in refusal(body)
        else:
            assert parse_object(body) == {"a": int("9" * digits)}


def test_a_large_body_is_read_in_a_thread_and_as_a_small_one_is() -> None:
    threads: list[str] = []

    def parsed(body: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return parse_object(body)

    async def read_object(body: bytes) -> dict[str, Any]:
        incoming = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return incoming.pop() if incoming else await asyncio.Future()

        async def send(_: Any) -> None: ...

        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        exchange = HttpExchange(scope, receive, send, BodyBudget())
        try:
            return (await exchange.read_object()).fields
        finally:
            exchange.end()

    body = b'{"a": "' + b"x" * 90 + b'"}'
    with (
        mock.patch.object(http_exchange, "SMALL_BYTES_MAX", len(body) - 1),
        mock.patch.object(http_exchange, "parse_object", parsed),
    ):
        assert asyncio.run(read_object(body)) == {"a": "x" * 90}
        assert asyncio.run(read_object(body.replace(b"xx", b"x"))) == {"a": "x" * 45}
        with pytest.raises(RequestError):
            asyncio.run(read_object(body[:-1] + b" "))
    assert [name == "MainThread" for name in threads] == [False, True, False]


@given(JSON, st.integers(1, 9), st.sampled_from([None, 1]))
def test_values_are_counted_without_reading_them(value: Any, size: int, indent: Any) -> None:
    with mock.patch.object(strict_json, "SLICE_BYTES", size):
        assert json_values(json.dumps(value, indent=indent).encode()) == value_count(value)


def test_a_body_of_too_many_values_is_refused_unread_and_one_of_too_many_commas_is_not() -> None:
    with (
        mock.patch.object(strict_json, "VALUES_MAX", 9),
        mock.patch.object(orjson, "loads", side_effect=AssertionError("read")),
    ):
        assert "holds 10 JSON values and this server accepts 9" in refusal(
            b'{"a": [1, 2, {}, [], [3], "]", 4]}'
        )
    with mock.patch.object(strict_json, "VALUES_MAX", 3):
        assert parse_object(b'{"a": ",,,,[[{{", "b": "x"}')


def test_nesting_is_bounded_exactly() -> None:
    assert parse_object(nested(DEPTH_MAX))
    assert "deeper than" in refusal(nested(DEPTH_MAX + 1))
    assert refusal(nested(100_000))


PIECES = st.lists(
    st.integers(0xD7FF, 0xE000).map("\\u{:04x}".format)
    | st.integers(0xD800, 0xDFFF).map("\\u{:X}".format)
    | st.sampled_from(
        ["\\\\", '\\"', "\\n", "u", "ud83d", "d", "x", "é", "\U0001f600", "\\ud83d\\ude00"]
    ),
    max_size=12,
).map("".join)


@given(st.lists(st.tuples(PIECES, PIECES), max_size=2))
def test_half_a_character_is_read_as_one_that_is_unknown(rows: list[tuple[str, str]]) -> None:
    body = "{" + ",".join(f'"{key}":["{text}"]' for key, text in rows) + "}"
    found = parse_object(body.encode())
    json.dumps(found, ensure_ascii=False).encode()  # fails on a surrogate
    halves = json.dumps(json.loads(body), ensure_ascii=False)
    whole = halves.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert found == json.loads(whole)


def test_a_cut_through_a_character_spoils_nothing_else() -> None:
    body = rb'{"a\ud83d": "\ud83d x \\ud83d \ud83d\ude00 \\\ude00", "b": 12345678901234567890}'
    wanted = {"a\ufffd": "\ufffd x \\ud83d \U0001f600 \\\ufffd", "b": 12345678901234567890}
    assert parse_object(body) == wanted
    assert "deeper than" in refusal(nested(DEPTH_MAX + 1).replace(b"a", rb"\ud83d"))
    assert refusal(nested(100_000).replace(b"a", rb"\ud83d"))


def test_an_argument_is_an_object_or_nothing() -> None:
    assert parse_argument('{"a": 1}') == {"a": 1}
    for text in ("", "x", "[1]", "\ud800", nested(300).decode()):
        assert parse_argument(text) is None
