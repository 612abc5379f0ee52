"""Attacks the listener by raw socket: smugglers, floods of connections, clients that half-close."""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from hearth.proxy.app import ProxyApp
from hearth.proxy.event_loop import SuspendingEventLoop
from hearth.proxy.http import connection_places, http1_protocol
from hearth.proxy.http.body_memory_budget import BodyBudget
from hearth.proxy.http.connection_places import ConnectionPlaces
from hearth.proxy.http.http_exchange import ClientGone, HttpExchange
from scripts.faults.smuggled_requests import HIDDEN, HOST, SMUGGLED
from tests.helpers.proxy.proxy_app import app_of, serving

pytestmark = pytest.mark.process

KEY = b"Authorization: Bearer good\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
MODELS = b"GET /v1/models HTTP/1.1\r\n" + HOST
KEYED = MODELS + KEY + b"\r\n"
HALF_A_BODY = b"POST /v1/messages HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n"
PLACES = 6
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def served(run: Coroutine[Any, Any, None]) -> None:
    """Run `run` on the loop that the server has: what an end of sending does is the loop's."""
    with asyncio.Runner(loop_factory=SuspendingEventLoop) as runner:
        runner.run(run)


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
    return app_of(tmp_path, ConnectionPlaces(PLACES), PROXY_API_KEY="good")


@pytest.fixture
def keyless(tmp_path: Any) -> ProxyApp:
    return app_of(tmp_path, ConnectionPlaces(PLACES))


Opener = Callable[[], Awaitable[Streams]]


def attacking(
    edge: ProxyApp, attack: Callable[[Opener], Awaitable[None]], served_by: Any = None
) -> None:
    """Run `attack` against a served `edge`; it is given what opens a connection."""

    async def run() -> None:
        opened: list[Streams] = []
        async with serving(served_by or edge, edge) as port:

            async def connect() -> Streams:
                opened.append(await asyncio.open_connection("127.0.0.1", port))
                return opened[-1]

            try:
                await attack(connect)
            finally:
                for _, writer in opened:
                    writer.transport.abort()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(http1_protocol, "JUDGE_S", 1.0)  # a busy machine is slow to send
        served(run())


# ---------------------------------------------------------------- what is no HTTP


def test_smuggling_by_raw_socket_is_a_400_in_the_dialect_and_nothing_behind_it_is_served(
    keyless: ProxyApp,
) -> None:
    paths: list[str] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await keyless(scope, receive, send)

    async def attack(connect: Opener) -> None:
        for wrong, sent in SMUGGLED.items():
            streams = await connect()
            status, head, body = await asked(streams, sent + HIDDEN)
            assert (status, await has_ended(streams)) == (400, True), wrong
            assert b"connection: close" in head and b"x-request-id" in head, wrong
            told = json.loads(body)["error"]
            assert told["code"] == "malformed_request" and told["message"].endswith("."), wrong
            streams[1].close()

    attacking(keyless, attack, noting)
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
def test_smuggling_behind_a_served_request_is_told_in_the_words_of_its_own_dialect(
    keyless: ProxyApp, head: bytes, is_anthropic: bool
) -> None:
    async def attack(connect: Opener) -> None:
        streams = await connect()
        assert (await asked(streams, HEALTH + head + HIDDEN))[0] == 200
        status, _, body = await answer_on(streams[0])
        row = json.loads(body)
        assert (status, row.get("type") == "error") == (400, is_anthropic)
        assert row["error"]["type"] == "invalid_request_error"
        assert await has_ended(streams)

    attacking(keyless, attack)


def test_a_refused_client_that_goes_on_sending_can_read_why(
    keyless: ProxyApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is cut off: it holds its place for no longer than it takes to read."""
    monkeypatch.setattr(http1_protocol, "LINGER_S_MAX", 0.5)

    async def attack(connect: Opener) -> None:
        reader, writer = await connect()
        writer.write(SMUGGLED["a length and a coding"] + b"x" * 2_000_000)
        assert (await answer_on(reader))[0] == 400
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"x" * 100_000)
                await asyncio.wait_for(writer.drain(), 60)
                await asyncio.sleep(0.01)

    attacking(keyless, attack)


def test_a_websocket_is_refused_and_keeps_no_place(keyless: ProxyApp) -> None:
    upgrade = (
        b"GET /v1/responses HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )

    async def attack(connect: Opener) -> None:
        streams = await connect()
        assert (await asked(streams, upgrade))[0] == 403
        assert await has_ended(streams)
        streams[1].close()
        while len(keyless.places):
            await asyncio.sleep(0.01)

    attacking(keyless, attack)


# ---------------------------------------------------------------- connections


def test_a_flood_of_connections_without_a_key_shuts_nobody_with_a_key_out(edge: ProxyApp) -> None:
    async def attack(connect: Opener) -> None:
        held = [await connect() for _ in range(PLACES)]
        for each in held:
            assert (await asked(each, HEALTH))[0] == 200
        keyed = await connect()
        assert (await asked(keyed, KEYED))[0] == 200
        assert await has_ended(held[0]), "the one that was idle longest"
        for _ in range(3 * PLACES):
            assert (await asked(await connect(), HEALTH))[0] == 200, "a newcomer is served"
        assert (await asked(keyed, KEYED))[0] == 200, "whoever has shown a key is kept"
        while len(edge.places) > PLACES:
            await asyncio.sleep(0.01)

    attacking(edge, attack)
    assert b'closed_total{why="displaced"} 19.0' in edge.metrics.text([], {})


def test_a_flood_that_sends_nothing_or_half_a_body_goes_before_an_idle_client_with_a_key(
    edge: ProxyApp,
) -> None:
    async def attack(connect: Opener) -> None:
        keyed = await connect()
        assert (await asked(keyed, KEYED))[0] == 200
        for number in range(3 * PLACES):
            _, writer = await connect()
            writer.write((b"", b"GET", HALF_A_BODY + b"\r\nabc")[number % 3])
            await asyncio.sleep(0.01)
        assert (await asked(keyed, KEYED))[0] == 200

    attacking(edge, attack)


def test_a_401_closes_its_connection(edge: ProxyApp) -> None:
    async def attack(connect: Opener) -> None:
        streams = await connect()
        status, head, _ = await asked(streams, MODELS + b"\r\n")
        assert status == 401 and b"connection: close" in head
        assert await has_ended(streams)

    attacking(edge, attack)


def test_a_monitor_asks_for_health_again_and_again_on_one_connection(edge: ProxyApp) -> None:
    async def attack(connect: Opener) -> None:
        streams = await connect()
        for _ in range(3):
            status, head, _ = await asked(streams, HEALTH)
            assert status == 200 and b"connection: close" not in head

    attacking(edge, attack)


@pytest.mark.parametrize("path", [b"/v1/messages", b"/v1/chat/completions"])
def test_where_all_are_amid_requests_with_a_key_a_newcomer_is_told_so_in_its_dialect(
    edge: ProxyApp, path: bytes
) -> None:
    async def attack(connect: Opener) -> None:
        busy = [await connect() for _ in range(PLACES)]
        for _, writer in busy:
            writer.write(HALF_A_BODY + KEY + b"\r\n{")
        while not edge.places.are_taken:
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

    attacking(edge, attack)


def test_without_keys_idle_connections_go_first_and_busy_ones_stay(keyless: ProxyApp) -> None:
    async def attack(connect: Opener) -> None:
        busy = await connect()
        busy[1].write(HALF_A_BODY + b"\r\n{")
        idle = await connect()
        assert (await asked(idle, MODELS + b"\r\n"))[0] == 200
        for _ in range(PLACES):
            assert (await asked(await connect(), MODELS + b"\r\n"))[0] == 200
        assert await has_ended(idle)
        busy[1].write(b"xxxxxxxx")
        assert (await answer_on(busy[0]))[0] == 400

    attacking(keyless, attack)


def test_places_are_within_the_files_that_may_be_open() -> None:
    within = connection_places.places_within
    assert [within(files) for files in (4096, 2_128, 256, 64)] == [1_000, 1_000, 64, 1]


# ---------------------------------------------------------------- half-closing clients


class Recorder:
    """An app that answers late, and notes how each request ended."""

    def __init__(self, *, is_stream: bool, wait_s: float) -> None:
        self.ends: list[str] = []
        self._is_stream, self._wait_s = is_stream, wait_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        exchange = HttpExchange(scope, receive, send, BodyBudget())
        try:
            await exchange.read_body()
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


def half_closing(app: Recorder, talk: Callable[[socket.socket], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving(app) as port:  # type: ignore[arg-type]
            with socket.socket() as client:
                client.setblocking(False)
                await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
                await talk(client)
            async with asyncio.timeout(60):
                while not app.ends:
                    await asyncio.sleep(0.01)

    served(run())


async def read_to_end(client: socket.socket) -> bytes:
    found, loop = b"", asyncio.get_running_loop()
    while part := await asyncio.wait_for(loop.sock_recv(client, 65_536), 60):
        found += part
    return found


POST_2 = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("wait_s", [0.0, 0.8])
def test_a_client_that_half_closes_after_its_request_gets_its_whole_answer(
    monkeypatch: pytest.MonkeyPatch, is_stream: bool, wait_s: float
) -> None:
    if not wait_s:
        monkeypatch.setattr(http1_protocol, "PROBE_S_MIN", 60.0)

    async def talk(client: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(client, POST_2)
        client.shutdown(socket.SHUT_WR)
        found = await read_to_end(client)
        assert b"HTTP/1.1 200" in found
        assert found.endswith(b"data: last\n\n\r\n0\r\n\r\n" if is_stream else b'{"whole":true}')
        if wait_s == 0:
            assert found.startswith(b"HTTP/1.1 200"), "a short answer comes without any question"

    app = Recorder(is_stream=is_stream, wait_s=wait_s)
    half_closing(app, talk)
    assert app.ends == ["answered"]


def test_each_of_two_requests_before_a_half_close_is_answered_and_then_the_end_comes() -> None:
    async def talk(client: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(client, POST_2 + POST_2)
        client.shutdown(socket.SHUT_WR)
        assert (await read_to_end(client)).count(b'{"whole":true}') == 2

    app = Recorder(is_stream=False, wait_s=0.05)
    half_closing(app, talk)
    assert app.ends == ["answered"] * 2


def test_what_follows_a_request_that_was_to_be_the_last_cuts_its_answer_not_off() -> None:
    async def talk(client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(client, POST_2.replace(HOST, HOST + b"Connection: close\r\n"))
        while b"first" not in await loop.sock_recv(client, 65_536):
            pass
        await loop.sock_sendall(client, b"\r\nno HTTP\r\n\r\n" + HIDDEN)
        assert (await read_to_end(client)).endswith(b"data: last\n\n\r\n0\r\n\r\n")

    app = Recorder(is_stream=True, wait_s=0.3)
    half_closing(app, talk)
    assert app.ends == ["answered"]


@pytest.mark.parametrize(
    ("part", "sent"), [("head", POST_2[:9]), ("head", POST_2[:30]), ("body", POST_2[:-1])]
)
def test_a_client_that_half_closes_amid_its_request_is_told_so(part: str, sent: bytes) -> None:
    async def talk(client: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(client, sent)
        client.shutdown(socket.SHUT_WR)
        found = await read_to_end(client)
        assert found.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert found.count(b"HTTP/1.1") == 1
        assert f"The request ends amid its {part}.".encode() in found
        app.ends.append("told")

    app = Recorder(is_stream=False, wait_s=0.0)
    half_closing(app, talk)
    assert sorted(app.ends) == (["gone", "told"] if part == "body" else ["told"])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("leaving", ["close", "reset", "half-close, then close"])
def test_a_client_that_left_is_told_from_one_that_half_closed(
    is_stream: bool, leaving: str
) -> None:
    async def talk(client: socket.socket) -> None:
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

    app = Recorder(is_stream=is_stream, wait_s=60.0)
    half_closing(app, talk)
    assert app.ends == ["gone"]


def test_a_stream_is_framed_in_chunks_and_for_http_1_0_and_a_head_as_they_take_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1_protocol, "PROBE_S_MIN", 60.0)
    events = b"data: first\n\n", b"data: last\n\n"
    chunked = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in (*events, b""))
    close = b"Connection: close\r\n"
    for line, body in (
        (b"GET / HTTP/1.1\r\n" + HOST + close, chunked),
        (b"GET / HTTP/1.0\r\n" + HOST, b"".join(events)),
        (b"HEAD / HTTP/1.1\r\n" + HOST + close, b""),
    ):

        async def talk(client: socket.socket, head: bytes = line, body: bytes = body) -> None:
            await asyncio.get_running_loop().sock_sendall(client, head + b"\r\n")
            told, found = (await read_to_end(client)).split(b"\r\n\r\n", 1)
            assert found == body
            assert (b"transfer-encoding: chunked" in told.lower()) is (b"1.1" in head)

        app = Recorder(is_stream=True, wait_s=0.0)
        half_closing(app, talk)
        assert app.ends == ["answered"]


def test_a_half_closing_client_of_http_1_0_is_answered_at_once_or_taken_for_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HTTP/1.0 has nothing to ask it by."""
    for wait_s, ends in ((0.0, ["answered"]), (60.0, ["gone"])):
        monkeypatch.setattr(http1_protocol, "PROBE_S_MIN", 0.1 if wait_s else 60.0)

        async def talk(client: socket.socket, is_quick: bool = not wait_s) -> None:
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.0\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            assert (b"200" in await read_to_end(client)) is is_quick

        app = Recorder(is_stream=False, wait_s=wait_s)
        half_closing(app, talk)
        assert app.ends == ends


# ---------------------------------------------------------------- who goes first


class Held:
    """A connection that notes whether it was closed."""

    is_closed = False

    def abort(self) -> None:
        self.is_closed = True


def held_by(places: ConnectionPlaces, count: int) -> list[Held]:
    held = [Held() for _ in range(count)]
    for each in held:
        places.enter(each)
    return held


def test_a_newcomer_that_came_amid_a_burst_shows_its_key_before_anyone_is_closed() -> None:
    places = ConnectionPlaces(PLACES)
    held = held_by(places, 2 * PLACES)
    assert not any(each.is_closed for each in held)
    places.move(held[0], is_trusted=True, is_busy=True)
    places.trim()
    assert [each.is_closed for each in held] == [False] + [True] * PLACES + [False] * (PLACES - 1)


def test_a_flood_without_a_pause_opens_no_more_than_twice_the_places() -> None:
    places = ConnectionPlaces(PLACES)
    held = held_by(places, 9 * PLACES)
    assert len(places) <= 2 * PLACES and not held[-1].is_closed
    assert sum(not each.is_closed for each in held) == len(places)


def test_the_least_goes_first_and_one_newcomer_beside_all_that_are_busy_is_left() -> None:
    places = ConnectionPlaces(4)
    held = held_by(places, 6)
    for each, standing in zip(held, (1, 0, 3, 2, 3, 1), strict=True):
        places.move(each, is_trusted=standing > 1, is_busy=standing % 2 == 1)
    places.trim()
    assert [each.is_closed for each in held] == [True, True, False, False, False, False]
    places.move(held[5], is_trusted=True, is_busy=False)
    (newcomer,) = held_by(places, 1)
    places.trim()
    assert newcomer.is_closed and not held[3].is_closed, "idle, but with a key"
    for each in held[2:]:
        places.move(each, is_trusted=True, is_busy=True)
    (newcomer,) = held_by(places, 1)
    places.trim()
    assert places.are_taken and not newcomer.is_closed
    held_by(places, 1)
    places.trim()
    assert newcomer.is_closed and len(places) == 5
    places.leave(held[2])
    places.leave(held[2])
    places.move(held[2], is_trusted=True, is_busy=True)
    assert not places.are_taken and len(places) == 4
