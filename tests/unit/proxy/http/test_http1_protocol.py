"""Attacks the listener by raw socket: smugglers and floods of connections."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from hearth.proxy.app import ProxyApp
from hearth.proxy.http import http1_protocol
from hearth.proxy.http.event_loop import SuspendingEventLoop
from hearth.proxy.http.http1_protocol import ConnectionSlots
from scripts.faults.smuggled_requests import HIDDEN, HOST, SMUGGLED
from tests.helpers.proxy.proxy_app import app_of, serving

pytestmark = pytest.mark.process
LOOP_FACTORY = SuspendingEventLoop  # the server's: what an end of sending does is the loop's

KEY = b"Authorization: Bearer good\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\n" + HOST
KEYED = MODELS + KEY + b"\r\n"
HALF_A_BODY = b"POST /v1/messages HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n"
PLACES = 6
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer_on(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Return the status, head and body of the next answer that has a length."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    rows = [line.split(b":", 1) for line in head.lower().split(b"\r\n") if b":" in line]
    length = int({name: value for name, value in rows}[b"content-length"])
    return int(head.split()[1]), head.lower(), await reader.readexactly(length)


async def asked(streams: Streams, request: bytes) -> tuple[int, bytes, bytes]:
    streams[1].write(request)
    return await answer_on(streams[0])


async def has_ended(streams: Streams) -> bool:
    """Wait for the server to close the connection; tell whether it sent nothing more."""
    try:
        return await asyncio.wait_for(streams[0].read(), 60) == b""
    except ConnectionError:
        return True


@pytest.fixture
def edge(tmp_path: Any) -> ProxyApp:
    return app_of(tmp_path, ConnectionSlots(PLACES), PROXY_API_KEY="good")


@pytest.fixture
def keyless(tmp_path: Any) -> ProxyApp:
    return app_of(tmp_path, ConnectionSlots(PLACES))


Opener = Callable[[], Awaitable[Streams]]


@contextlib.asynccontextmanager
async def attacked(edge: ProxyApp, served_by: Any = None) -> AsyncIterator[Opener]:
    """Serve `edge`, and give what opens a connection to it."""
    opened: list[Streams] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(http1_protocol, "JUDGE_S", 1.0)  # a busy machine is slow to send
        async with serving(served_by or edge, edge) as port:

            async def connect() -> Streams:
                opened.append(await asyncio.open_connection("127.0.0.1", port))
                return opened[-1]

            try:
                yield connect
            finally:
                for _, writer in opened:
                    writer.transport.abort()


# ---------------------------------------------------------------- what is no HTTP


async def test_smuggling_by_raw_socket_is_a_400_in_the_dialect_and_nothing_behind_it_is_served(
    keyless: ProxyApp,
) -> None:
    paths: list[str] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await keyless(scope, receive, send)

    async with attacked(keyless, noting) as connect:
        for wrong, sent in SMUGGLED.items():
            streams = await connect()
            status, head, body = await asked(streams, sent + HIDDEN)
            assert (status, await has_ended(streams)) == (400, True), wrong
            assert b"connection: close" in head and b"x-request-id" in head, wrong
            told = json.loads(body)["error"]
            assert told["code"] == "malformed_request" and told["message"].endswith("."), wrong
            streams[1].close()
    assert "/hidden" not in paths
    text = keyless.metrics.text([], {}).decode()
    assert f'connections_closed_total{{why="malformed"}} {len(SMUGGLED)}.0' in text


@pytest.mark.parametrize(
    ("head", "is_anthropic"),
    [
        (b"POST /v1/messages HTTP/1.1\r\n" + HOST + b"Content-Length: 3, 3\r\n\r\nabc", True),
        (b"POST http://127.0.0.1:4000/v1/messages HTTP/1.1\r\n\r\n", True),
        (b"GET /v1/models HTTP/1.1\r\nAnthropic-Version: 2023-06-01\r\n\r\n", True),
        (b"POST /v1/messages\n", True),
        (b"POST /v1/chat/completions HTTP/1.1\r\n\r\n", False),
        (b"GET /x?/v1/messages HTTP/1.1\r\nX: anthropic-version: 1\r\n\r\n", False),
    ],
)
async def test_smuggling_behind_a_served_request_is_told_in_the_words_of_its_own_dialect(
    keyless: ProxyApp, head: bytes, is_anthropic: bool
) -> None:
    async with attacked(keyless) as connect:
        streams = await connect()
        assert (await asked(streams, HEALTH + head + HIDDEN))[0] == 200
        status, _, body = await answer_on(streams[0])
        row = json.loads(body)
        assert (status, row.get("type") == "error") == (400, is_anthropic)
        assert row["error"]["type"] == "invalid_request_error"
        assert await has_ended(streams)


async def test_a_refused_client_that_goes_on_sending_can_read_why(
    keyless: ProxyApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is cut off: it holds its place for no longer than it takes to read."""
    monkeypatch.setattr(http1_protocol, "LINGER_S_MAX", 0.5)

    async with attacked(keyless) as connect:
        reader, writer = await connect()
        writer.write(SMUGGLED["a length and a coding"] + b"x" * 2_000_000)
        assert (await answer_on(reader))[0] == 400
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"x" * 100_000)
                await asyncio.wait_for(writer.drain(), 60)
                await asyncio.sleep(0.01)


async def test_a_websocket_is_refused_and_keeps_no_place(keyless: ProxyApp) -> None:
    upgrade = (
        b"GET /v1/responses HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )

    async with attacked(keyless) as connect:
        streams = await connect()
        assert (await asked(streams, upgrade))[0] == 403
        assert await has_ended(streams)
        streams[1].close()
        while len(keyless.slots):
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------- connections


async def test_a_flood_of_connections_without_a_key_shuts_nobody_with_a_key_out(
    edge: ProxyApp,
) -> None:
    async with attacked(edge) as connect:
        held = [await connect() for _ in range(PLACES)]
        for each in held:
            assert (await asked(each, HEALTH))[0] == 200
        keyed = await connect()
        assert (await asked(keyed, KEYED))[0] == 200
        assert await has_ended(held[0]), "the one that was idle longest"
        for _ in range(3 * PLACES):
            assert (await asked(await connect(), HEALTH))[0] == 200, "a newcomer is served"
        assert (await asked(keyed, KEYED))[0] == 200, "whoever has shown a key is kept"
        while len(edge.slots) > PLACES:
            await asyncio.sleep(0.01)
    assert b'closed_total{why="displaced"} 19.0' in edge.metrics.text([], {})


async def test_a_flood_that_sends_nothing_or_half_a_body_goes_before_an_idle_client_with_a_key(
    edge: ProxyApp,
) -> None:
    async with attacked(edge) as connect:
        keyed = await connect()
        assert (await asked(keyed, KEYED))[0] == 200
        for number in range(3 * PLACES):
            _, writer = await connect()
            writer.write((b"", b"GET", HALF_A_BODY + b"\r\nabc")[number % 3])
            await asyncio.sleep(0.01)
        assert (await asked(keyed, KEYED))[0] == 200


async def test_a_401_closes_its_connection(edge: ProxyApp) -> None:
    async with attacked(edge) as connect:
        streams = await connect()
        status, head, _ = await asked(streams, MODELS + b"\r\n")
        assert status == 401 and b"connection: close" in head
        assert await has_ended(streams)


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/chat/completions"])
async def test_where_all_are_amid_requests_with_a_key_a_newcomer_is_told_so_in_its_dialect(
    edge: ProxyApp, path: bytes
) -> None:
    async with attacked(edge) as connect:
        busy = [await connect() for _ in range(PLACES)]
        for _, writer in busy:
            writer.write(HALF_A_BODY + KEY + b"\r\n{")
        while not edge.slots.are_full:
            await asyncio.sleep(0.01)
        for _ in range(3):
            newcomer = await connect()
            request = b"POST " + path + b" HTTP/1.1\r\n" + HOST + KEY + b"Content-Length: 0\r\n\r\n"
            status, head, body = await asked(newcomer, request)
            assert status == 503 and b"retry-after: 5\r\n" in head
            told = json.loads(body)
            assert (told.get("type") == "error") is path.endswith(b"messages")
            assert f"{PLACES} connections" in told["error"]["message"]
            assert await has_ended(newcomer)
        assert (await asked(await connect(), HEALTH))[0] == 200, "a monitor is answered even so"
        for reader, writer in busy:
            writer.write(b"xxxxxxxx")
            assert (await answer_on(reader))[0] == 400, "whoever has a key is never cut off"
        assert (await asked(await connect(), KEYED))[0] == 200
