"""Clients that end their side and wait are answered; those that left are found out."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hearth.proxy.http import http1_protocol
from hearth.proxy.http.event_loop import SuspendingEventLoop
from hearth.proxy.http.http_exchange import BodyBudget, ClientGone, HttpExchange
from scripts.faults.smuggled_requests import HIDDEN, HOST
from tests.helpers.proxy.proxy_app import serving

pytestmark = pytest.mark.process
LOOP_FACTORY = SuspendingEventLoop  # the server's: what an end of sending does is the loop's


class Recorder:
    """An app that answers late, and notes how each request ended."""

    def __init__(self, *, is_stream: bool, wait_s: float) -> None:
        self.ends: list[str] = []
        self._is_stream, self._wait_s = is_stream, wait_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = HttpExchange(scope, receive, send, BodyBudget())
        try:
            await exchange.read_body(1_000)
            await exchange.while_connected(self._answer(exchange))
            self.ends.append("answered")
        except ClientGone:
            self.ends.append("gone")
        finally:
            exchange.end()

    async def _answer(self, exchange: HttpExchange) -> None:
        if self._is_stream:
            await exchange.send_events(self._events())
        else:
            await asyncio.sleep(self._wait_s)
            await exchange.send_json(200, {"whole": True})

    async def _events(self) -> AsyncIterator[bytes]:  # type: ignore[misc]
        yield b"data: first\n\n"
        await asyncio.sleep(self._wait_s)
        yield b"data: last\n\n"


@contextlib.asynccontextmanager
async def half_closing(app: Recorder) -> AsyncIterator[socket.socket]:
    """Give a connection to a server of `app`, and wait for what comes of its request."""
    async with serving(app) as port:  # type: ignore[arg-type]
        with socket.socket() as client:
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
            yield client
        while not app.ends:
            await asyncio.sleep(0.01)


async def read_to_end(client: socket.socket) -> bytes:
    found, loop = b"", asyncio.get_running_loop()
    while part := await asyncio.wait_for(loop.sock_recv(client, 65_536), 60):
        found += part
    return found


POST_2 = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("wait_s", [0.0, 0.8])
async def test_a_client_that_half_closes_after_its_request_gets_its_whole_answer(
    monkeypatch: pytest.MonkeyPatch, is_stream: bool, wait_s: float
) -> None:
    if not wait_s:
        monkeypatch.setattr(http1_protocol, "PROBE_S_MIN", 60.0)

    app = Recorder(is_stream=is_stream, wait_s=wait_s)
    async with half_closing(app) as client:
        await asyncio.get_running_loop().sock_sendall(client, POST_2)
        client.shutdown(socket.SHUT_WR)
        found = await read_to_end(client)
        assert b"HTTP/1.1 200" in found
        assert found.endswith(b"data: last\n\n\r\n0\r\n\r\n" if is_stream else b'{"whole":true}')
        if wait_s == 0:
            assert found.startswith(b"HTTP/1.1 200"), "a short answer comes without any question"
    assert app.ends == ["answered"]


async def test_each_of_two_requests_before_a_half_close_is_answered_and_then_the_end_comes() -> (
    None
):
    app = Recorder(is_stream=False, wait_s=0.05)
    async with half_closing(app) as client:
        await asyncio.get_running_loop().sock_sendall(client, POST_2 + POST_2)
        client.shutdown(socket.SHUT_WR)
        assert (await read_to_end(client)).count(b'{"whole":true}') == 2
    assert app.ends == ["answered"] * 2


async def test_what_follows_a_request_that_was_to_be_the_last_cuts_its_answer_not_off() -> None:
    app = Recorder(is_stream=True, wait_s=0.3)
    async with half_closing(app) as client:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, POST_2.replace(HOST, HOST + b"Connection: close\r\n"))
        while b"first" not in await loop.sock_recv(client, 65_536):
            pass
        await loop.sock_sendall(client, b"\r\nno HTTP\r\n\r\n" + HIDDEN)
        assert (await read_to_end(client)).endswith(b"data: last\n\n\r\n0\r\n\r\n")
    assert app.ends == ["answered"]


@pytest.mark.parametrize(
    ("part", "sent"), [("head", POST_2[:9]), ("head", POST_2[:30]), ("body", POST_2[:-1])]
)
async def test_a_client_that_half_closes_amid_its_request_is_told_so(
    part: str, sent: bytes
) -> None:
    app = Recorder(is_stream=False, wait_s=0.0)
    async with half_closing(app) as client:
        await asyncio.get_running_loop().sock_sendall(client, sent)
        client.shutdown(socket.SHUT_WR)
        found = await read_to_end(client)
        assert found.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert found.count(b"HTTP/1.1") == 1
        assert f"The request ends amid its {part}.".encode() in found
        app.ends.append("told")
    assert sorted(app.ends) == (["gone", "told"] if part == "body" else ["told"])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("leaving", ["close", "reset", "half-close, then close"])
async def test_a_client_that_left_is_told_from_one_that_half_closed(
    is_stream: bool, leaving: str
) -> None:
    app = Recorder(is_stream=is_stream, wait_s=60.0)
    async with half_closing(app) as client:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, POST_2)
        if is_stream:
            while b"first" not in await loop.sock_recv(client, 65_536):
                pass
        await asyncio.sleep(0.05)
        if leaving == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif leaving != "close":
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.3)
        client.close()
    assert app.ends == ["gone"]


async def test_a_stream_is_framed_in_chunks_and_for_http_1_0_and_a_head_as_they_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1_protocol, "PROBE_S_MIN", 60.0)
    events = b"data: first\n\n", b"data: last\n\n"
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in (*events, b""))
    close = b"Connection: close\r\n"
    for head, body in (
        (b"GET / HTTP/1.1\r\n" + HOST + close, chunked),
        (b"GET / HTTP/1.0\r\n" + HOST, b"".join(events)),
        (b"HEAD / HTTP/1.1\r\n" + HOST + close, b""),
    ):
        app = Recorder(is_stream=True, wait_s=0.0)
        async with half_closing(app) as client:
            await asyncio.get_running_loop().sock_sendall(client, head + b"\r\n")
            told, found = (await read_to_end(client)).split(b"\r\n\r\n", 1)
            assert found == body
            assert (b"transfer-encoding: chunked" in told.lower()) is (b"1.1" in head)
        assert app.ends == ["answered"]


async def test_a_half_closing_client_of_http_1_0_is_answered_at_once_or_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HTTP/1.0 has nothing to ask it by."""
    for wait_s, ends in ((0.0, ["answered"]), (60.0, ["gone"])):
        monkeypatch.setattr(http1_protocol, "PROBE_S_MIN", 0.1 if wait_s else 60.0)
        app = Recorder(is_stream=False, wait_s=wait_s)
        async with half_closing(app) as client:
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.0\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            assert (b"200" in await read_to_end(client)) is (wait_s == 0)
        assert app.ends == ends
