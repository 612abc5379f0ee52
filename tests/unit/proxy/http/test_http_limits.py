"""Checks the limits on slow, endless and compressed heads and bodies."""

import asyncio
import contextlib
import gzip
import time
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hearth.proxy.app import HEADERS_MAX, ProxyApp
from hearth.proxy.http import http1_protocol, http_exchange as exchange_module
from hearth.proxy.http.strict_json import DEPTH_MAX, parse_object
from hearth.shared.errors import RequestError
from tests.helpers.proxy.proxy_app import app_of, ask, serving

pytestmark = pytest.mark.process

HOST = b"Host: 127.0.0.1\r\n"
HEAD = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"


@contextlib.asynccontextmanager
async def talking(
    edge: ProxyApp, **options: Any
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with serving(edge, **options) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def drip(writer: asyncio.StreamWriter, data: bytes, wait_s: float) -> None:
    with contextlib.suppress(ConnectionError):
        for byte in data:
            writer.write(bytes([byte]))
            await asyncio.sleep(wait_s)


@pytest.mark.parametrize("first", [b"", HEAD])
async def test_slowloris_a_byte_now_and_then_does_not_set_the_clock_back(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    """`first` is a whole request before it, on the same connection."""
    monkeypatch.setattr(http1_protocol, "HEAD_WAIT_S_MAX", 0.5)

    async with talking(app_of(tmp_path)) as (reader, writer):
        if first:
            writer.write(first)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(b"]}")
        began = time.monotonic()
        dripping = asyncio.create_task(drip(writer, b"GET / HTTP/1.1\r\nX-A: " + b"a" * 500, 0.1))
        with contextlib.suppress(ConnectionResetError):  # a byte came behind the connection's end
            await asyncio.wait_for(reader.read(), 60)
        assert 0.3 < time.monotonic() - began < 9
        dripping.cancel()


async def test_a_connection_that_waits_between_requests_is_kept(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent thinks for longer than a head may take."""
    monkeypatch.setattr(http1_protocol, "HEAD_WAIT_S_MAX", 0.3)

    async with talking(app_of(tmp_path), timeout_keep_alive=120) as (reader, writer):
        for _ in range(3):
            writer.write(HEAD)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.6)
            await reader.read(65536)


async def test_a_slow_body_is_not_a_slow_head(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_protocol, "HEAD_WAIT_S_MAX", 0.3)
    head = b"POST /v1/messages HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n"

    async with talking(app_of(tmp_path)) as (reader, writer):
        writer.write(head + b"{")
        await asyncio.sleep(0.8)
        writer.write(b"}")
        assert b"HTTP/1.1 400" in await reader.readuntil(b"\r\n\r\n")


async def test_a_head_without_an_end_is_refused_before_it_fills_memory(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_protocol, "LINGER_S_MAX", 60.0)

    async with talking(app_of(tmp_path)) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n" + HOST)
        for _ in range(1_000):
            writer.write(b"X-Many: " + b"a" * 1000 + b"\r\n")
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 60)
        assert answer.startswith(b"HTTP/1.1 431") and b"65,536 bytes" in answer


# ---------------------------------------------------------------- at the edge


def test_a_flood_of_headers_is_refused_before_anything_is_read(tmp_path: Any) -> None:
    edge = app_of(tmp_path)
    many = [(b"x-%d" % number, b"1") for number in range(HEADERS_MAX)]
    reply = ask(edge, "POST", "/v1/messages", *many, body=b"{}")
    assert (reply.status, reply.json["error"]["type"]) == (431, "invalid_request_error")
    assert f"accepts {HEADERS_MAX}" in reply.json["error"]["message"]
    assert ask(edge, "GET", "/health", *many[: HEADERS_MAX - 1]).status == 200


PACKED = {
    "gzip": gzip.compress(b" " * 10_000_000),
    "deflate": zlib.compress(b" " * 10_000_000),
    "br": b"\x8b",
    "zstd": b"(\xb5/\xfd",
    "gzip, identity": b"x",
    "GZIP": b"x",
}


@pytest.mark.parametrize("coding", sorted(PACKED))
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
def test_a_packed_bomb_is_refused_and_not_unpacked(tmp_path: Any, coding: str, path: str) -> None:
    header = (b"content-encoding", coding.encode())
    assert ask(app_of(tmp_path), "POST", path, header, body=PACKED[coding]).status == 415


async def test_a_chunked_body_without_an_end_is_refused_in_time(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "BODY_WAIT_S_MAX", 0.5)
    monkeypatch.setattr(exchange_module, "DRAIN_WAIT_S_MAX", 0.2)

    async with talking(app_of(tmp_path)) as (reader, writer):
        writer.write(b"POST /v1/messages HTTP/1.1\r\n" + HOST)
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        dripping = asyncio.create_task(drip(writer, b"1\r\n \r\n" * 200, 0.01))
        began = time.monotonic()
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)
        assert b"408" in answer and time.monotonic() - began < 9
        dripping.cancel()


def test_a_body_without_a_key_is_not_read_as_json(tmp_path: Any) -> None:
    """Who has no key cannot make this server parse anything."""
    edge = app_of(tmp_path, PROXY_API_KEY="k")
    for path in ("/v1/messages", "/v1/chat/completions", "/v1/responses"):
        assert ask(edge, "POST", path, body=b"[" * 1_000_000).status == 401


# ---------------------------------------------------------------- JSON that costs


def refused_after(body: bytes) -> float:
    """Return the CPU seconds that it takes to refuse `body`."""
    began = time.thread_time()
    with pytest.raises(RequestError) as caught:
        parse_object(body)
    assert caught.value.code == "invalid_json"
    assert len(str(caught.value)) < 400
    return time.thread_time() - began


@pytest.mark.parametrize(
    "number",
    [b"9" * 1_000_000, b"-" + b"1" * 1_000_000, b"2" * 20, b"-9223372036854775809"],
)
def test_a_number_of_a_million_digits_costs_nothing_and_is_refused(number: bytes) -> None:
    assert refused_after(b'{"seed": ' + number + b"}") < 2


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"b":['])
@pytest.mark.parametrize("depth", [DEPTH_MAX + 1, 2_000, 1_000_000])
def test_json_of_any_depth_is_refused_without_a_crash(opening: bytes, depth: int) -> None:
    assert refused_after(b'{"x":' + opening * depth) < 5
    closing = {b"[": b"]", b'{"a":': b"}", b'[{"b":[': b"]}]"}[opening]
    assert refused_after(b'{"x":' + opening * depth + b"1" + closing * depth + b"}") < 5
