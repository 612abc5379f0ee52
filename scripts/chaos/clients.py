"""Holds the clients of a chaos run, which send requests and count how each of them ended."""

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from scripts.chaos.judge_replies import End, Kind, Said, judge
from scripts.chaos.request_bodies import PATHS, TALKING, Body, Page, fresh

END_S_MAX: Final = 150.0  # a request without an end by then hangs
CHUNK_BYTES: Final = 65_536
SMALL_BUFFER_BYTES: Final = 4_096
TOLD_MAX: Final = 20  # misses that are kept as text
KEY: Final = "chaos"  # that the server takes; some attacks come without it
CALM: Final = "(no fault)"
GOOD: Final = frozenset[Kind](("answered", "busy", "failed"))
CALM_ENDS: Final = frozenset[Kind](("answered",))


# ---------------------------------------------------------------- tallies


@dataclass(slots=True)
class Tally:
    """What became of the requests of one fault."""

    ends: Counter[str] = field(default_factory=Counter)
    worst_end_s: float = 0.0  # from a request, or from the fault that came later, to its end
    recoveries_s: list[float] = field(default_factory=list)
    times: int = 0  # played


@dataclass(slots=True)
class Ledger:
    """All requests of a run: every one that is begun has one end. Owner: the event loop."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    misses: Counter[str] = field(default_factory=Counter)  # by text, each a reason to fail
    begun: int = 0
    ended: int = 0
    stage: str = CALM
    stage_began: float = 0.0
    _downs: list[tuple[float, float]] = field(default_factory=list)  # without a proxy

    def tally(self, stage: str) -> Tally:
        return self.tallies.setdefault(stage, Tally())

    def miss(self, text: str) -> None:
        if text in self.misses or len(self.misses) < TOLD_MAX:
            self.misses[text] += 1
        else:
            self.misses["(more)"] += 1

    @contextlib.contextmanager
    def playing(self, fault: str) -> Iterator[None]:
        self.stage, self.stage_began = fault, time.monotonic()
        self.tally(fault).times += 1
        try:
            yield
        finally:
            self.stage = CALM

    @contextlib.contextmanager
    def proxy_down(self) -> Iterator[None]:
        """Mark a time in which connections may be cut: there is no proxy to answer."""
        began = time.monotonic()
        self._downs.append((began, float("inf")))
        try:
            yield
        finally:
            self._downs[-1] = (began, time.monotonic())

    def note(self, stage: str, what: str, end: End, began: float, allowed: frozenset[Kind]) -> None:
        """Enter the end of a request that began in `stage` and ends now."""
        now = time.monotonic()
        self.ended += 1
        if stage == CALM != self.stage:
            stage, began_s = self.stage, max(began, self.stage_began)
        else:
            began_s = began
        if stage != CALM and allowed == CALM_ENDS:
            allowed = GOOD
        is_cut_by_us = end.kind == "cut" and any(
            began <= up and down <= now for down, up in self._downs
        )
        tally = self.tally(stage)
        tally.ends[end.kind] += 1
        tally.worst_end_s = max(tally.worst_end_s, now - began_s)
        if end.kind not in allowed and not is_cut_by_us:
            self.miss(f"{stage}: {what}: {end.kind} {end.detail}")


# ---------------------------------------------------------------- one request


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves on the wire. The default reads on until the connection ends."""

    leaves_s: float | None = None  # after that long it goes away
    resets: bool = False  # and rudely
    sends_part: float = 1.0  # of its bytes
    pause_s: float = 0.0  # in which it reads nothing
    buffer_bytes: int = 0  # of its socket; 0 = the system's
    half_closes: bool = False  # it ends its side behind the request


PLAIN: Final = Manner()


class Client:
    """Sends requests to one port, and enters the end of each. Owner: the event loop."""

    def __init__(self, port: int, ledger: Ledger) -> None:
        self._port = port
        self._ledger = ledger

    async def ask(
        self,
        dialect: str,
        body: Body | bytes,
        manner: Manner = PLAIN,
        allowed: frozenset[Kind] = CALM_ENDS,
        expected: Said | None = None,
    ) -> End:
        """Send one request of `dialect` and return its end; `expected` is the only right answer."""
        is_stream = isinstance(body, dict) and bool(body.get("stream"))
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        payload = head(self._port, dialect, len(content)) + content
        return await self.send(dialect, payload, manner, allowed, (is_stream, expected))

    async def send(
        self,
        dialect: str,
        payload: bytes,
        manner: Manner = PLAIN,
        allowed: frozenset[Kind] = CALM_ENDS,
        wanted: tuple[bool, Said | None] = (False, None),
    ) -> End:
        """Send bytes and return their end; `wanted`: whether it is a stream, and its answer."""
        ledger, began = self._ledger, time.monotonic()
        stage = ledger.stage
        ledger.begun += 1
        is_stream, expected = wanted
        end = await self._end(dialect, payload, manner, is_stream)
        if expected is not None and end.kind == "answered" and end.said != expected:
            end = End("wrong", f"{end.said} is not {expected}", end.said)
        ledger.note(stage, dialect or "garbage", end, began, allowed)
        return end

    async def _end(self, dialect: str, payload: bytes, manner: Manner, is_stream: bool) -> End:
        raw = bytearray()
        try:
            async with asyncio.timeout(END_S_MAX + manner.pause_s):
                why = await self._exchange(payload, manner, raw)
        except TimeoutError:
            return End("hung", f"{len(raw)} bytes came, the last {bytes(raw[-100:])!r}")
        if why == "left":
            return End("left")
        end = judge(dialect, is_stream, bytes(raw))
        return End("cut", f"{why} {end.detail}") if end.kind == "cut" else end

    async def _exchange(self, payload: bytes, manner: Manner, raw: bytearray) -> str:
        """Fill `raw` until the connection ends; return why it did: "left", or an error's name."""
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            if manner.buffer_bytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, manner.buffer_bytes)
            try:
                async with asyncio.timeout(manner.leaves_s):
                    await loop.sock_connect(sock, ("127.0.0.1", self._port))
                    with contextlib.suppress(ConnectionError):  # there may be an answer even so
                        part = int(len(payload) * manner.sends_part)
                        await loop.sock_sendall(sock, payload[:part])
                        if manner.half_closes:
                            sock.shutdown(socket.SHUT_WR)
                    await asyncio.sleep(manner.pause_s)
                    while chunk := await loop.sock_recv(sock, CHUNK_BYTES):
                        raw += chunk
            except TimeoutError:
                if manner.resets:
                    linger = struct.pack("ii", 1, 0)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return "left"
            except OSError as error:
                return type(error).__name__
        return "the end of the connection"


def head(port: int, dialect: str, size: int) -> bytes:
    return (
        f"POST {PATHS[dialect]} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Authorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    ).encode()


# ---------------------------------------------------------------- steady clients


@dataclass(frozen=True, slots=True)
class Known:
    """A page and what a cold cache answers to it."""

    page: Page
    said: Said


async def known(
    client: Client, pages: Sequence[Page], forget: Callable[[], Awaitable[None]]
) -> list[Known]:
    """Ask each page of an empty cache, which `forget` makes, and return the answers.

    The server feeds a conversation's next prompt the tokens that it sampled, where it remembers
    them, and those of the text where a killed worker took them along; a small model may answer
    the two differently. Pages are asked before the server has said their turns and after it, and
    those whose answer depends on that are left out.
    """
    answers: list[list[Said | None]] = []
    for order in (reversed(pages), pages):
        said = []
        for page in order:
            await forget()
            said.append((await client.ask(page.dialect, page.body)).said)
        answers.append(said)
    unsaid, after = reversed(answers[0]), answers[1]
    rows = zip(pages, unsaid, after, strict=True)
    return [Known(page, late) for page, early, late in rows if late is not None and early == late]


async def steady(client: Client, book: Sequence[Known], rng: random.Random) -> None:
    """Send what a steady client sends next: a known page or a new prompt, in any dialect."""
    is_stream = {"stream": rng.random() < 0.6}
    if rng.random() < 0.6:
        each = rng.choice(book)
        await client.ask(each.page.dialect, each.page.body | is_stream, expected=each.said)
    else:
        dialect = rng.choice((*TALKING, "completions"))
        await client.ask(dialect, fresh(rng, dialect) | is_stream)
