"""Draws requests as clients of every dialect and manner send them, and enters how each one ended.

What is asked is drawn from a finite set, each often: what a server remembers of it comes to its
bound, and a store that fills up is not taken for a leak.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hearth.commands.replay.shortened_sessions import shortened
from hearth.commands.replay.traces import EXCERPTS_DIR, load_trace, request_body
from scripts.faults.judge_replies import End, Kind, judge
from scripts.faults.own_server import MODEL_ID, OwnServer
from scripts.faults.smuggled_requests import HIDDEN, SMUGGLED
from scripts.fixtures.fixture_cache import fixture_dir

Body = dict[str, Any]

SHARES: Final = {
    "page": 40,  # of a captured agent's session
    "fresh": 14,  # a prompt that shares nothing, in any dialect, streamed or whole
    "stored": 14,
    "leaving": 10,  # before the body is whole, before the first byte, or amid the answer
    "malformed": 6,
    "counted": 4,
    "reported": 4,
    "wrong key": 3,
    "half-closing": 2,
    "smuggling": 2,  # a request that hides another, which must not be served
    "slow reader": 1,
}
PATHS: Final = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
REPORTS: Final = ("/v1/models", "/health", "/metrics", "/v1/sessions", "/v1/cache")
KEYS: Final = tuple(f"faults-{number}-{'k' * 32}" for number in range(3))
FRESH: Final = 64
END_S_MAX: Final = 150.0  # a request without an end by then hangs
TOLD_MAX: Final = 20  # misses that are kept as text
CALM: Final = "(no fault)"
ANSWERED: Final = frozenset[Kind](("answered",))
REFUSED: Final = frozenset[Kind](("refused",))
AMID_A_FAULT: Final = frozenset[Kind](("busy", "failed"))  # may befall any request then


@dataclass(frozen=True, slots=True)
class Manner:
    """How a client behaves on the wire. The default reads on until the connection ends."""

    leaves_s: float | None = None  # after that long it goes away, rudely where it `resets`
    resets: bool = False
    sends_part: float = 1.0  # of its bytes
    pause_s: float = 0.0  # in which it reads nothing, with a small buffer
    half_closes: bool = False  # it ends its side behind the request


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: what is sent, how, and which ends of it are right. `dialect` "": no model's."""

    kind: str
    dialect: str
    payload: bytes
    allowed: frozenset[Kind] = ANSWERED
    is_stream: bool = False
    manner: Manner = Manner()
    said: str | None = None  # what alone is a right answer, where that is known


# What fresh requests of a kind have of their own: in the body, on the wire, and as right ends.
OWN: Final[dict[str, tuple[Body, Manner, frozenset[Kind]]]] = {
    "stored": ({"store": True}, Manner(), ANSWERED),
    "leaving": ({}, Manner(), frozenset(("answered", "left"))),
    "wrong key": ({}, Manner(), REFUSED),
    "half-closing": ({}, Manner(half_closes=True), ANSWERED),
    "slow reader": (  # some 2 kB a token: more than sockets buffer
        {"stream": True, "logprobs": True, "top_logprobs": 20, "n": 2},
        Manner(pause_s=5.0),
        ANSWERED,
    ),
}


# ---------------------------------------------------------------- how requests end


@dataclass(slots=True)
class Ledger:
    """All requests of a run: every one that is begun has one end. Owner: the event loop."""

    ends: dict[str, Counter[str]] = field(default_factory=dict)  # of each stage, of each kind
    misses: Counter[str] = field(default_factory=Counter)  # by text, each a reason to fail
    begun: int = 0
    ended: int = 0
    stage: str = CALM
    stage_began: float = 0.0
    failed_s: float = 0.0  # from the stage's begin to the last error of what was under way then
    downs: list[tuple[float, float]] = field(default_factory=list)  # without a proxy

    def demand(self, holds: object, text: str) -> None:
        """Enter what does not hold as a miss."""
        if not holds:
            is_kept = text in self.misses or len(self.misses) < TOLD_MAX
            self.misses[text if is_kept else "(more)"] += 1

    @contextlib.contextmanager
    def playing(self, fault: str) -> Iterator[None]:
        self.stage, self.stage_began, self.failed_s = fault, time.monotonic(), 0.0
        yield
        self.stage = CALM

    @contextlib.contextmanager
    def proxy_down(self) -> Iterator[None]:
        """Mark a time in which connections may be cut: there is no proxy to answer."""
        began = time.monotonic()
        self.downs.append((began, float("inf")))
        yield
        self.downs[-1] = (began, time.monotonic())

    def told(self) -> dict[str, Any]:
        return {"requests": self.begun, "ends": self.ends, "misses": self.misses}

    def note(self, stage: str, asked: Asked, end: End, began: float) -> None:
        """Enter the end of a request that began in `stage` and ends now."""
        now = time.monotonic()
        self.ended += 1
        if stage == CALM != self.stage and end.kind in AMID_A_FAULT:
            self.failed_s = now - self.stage_began
        stage = self.stage if stage == CALM else stage
        for row in (stage, asked.kind):
            self.ends.setdefault(row, Counter())[end.kind] += 1
        is_down = any(began <= up and down <= now for down, up in self.downs)
        is_excused = is_down if end.kind == "cut" else end.kind in AMID_A_FAULT and stage != CALM
        told = end.detail.partition("; got ")[0]  # alike where only the bytes differ
        self.demand(
            end.kind in asked.allowed or is_excused,
            f"{stage}: {asked.kind} {asked.dialect}: {end.kind} {told}",
        )


# ---------------------------------------------------------------- what is asked


class Load:
    """Draws and sends requests. Owner: the event loop."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self.ledger = Ledger()
        self.known: dict[int, str] = {}  # page -> what a cold cache answers
        self.pages = [
            (row, request_body(row, MODEL_ID, tokens_max=24))
            for file in sorted(EXCERPTS_DIR.glob("*.jsonl.xz"))[:3]
            for row in shortened(load_trace(file), chars=60)[:4]
        ]
        for _, body in self.pages:  # thinking alone would not all be shown, and so not be held
            body.pop("thinking", None)

    def draw(self) -> Asked:
        """Return the next request, of any kind."""
        rng = self._rng
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        match kind:
            case "page":
                return self.page(rng.randrange(len(self.pages)))
            case "reported":
                return Asked(kind, "", self._head("GET", rng.choice(REPORTS)))
            case "smuggling":
                return Asked(kind, "chat", rng.choice([*SMUGGLED.values()]) + HIDDEN, REFUSED)
            case "malformed":
                dialect, content = rng.choice(list(malformed()))
                return Asked(kind, dialect, self.post(PATHS[dialect], content), REFUSED)
            case "counted":
                body = body_of("messages", f"How long is {rng.randrange(FRESH)}?")
                return Asked(kind, "", self.post("/v1/messages/count_tokens", body))
        return self._fresh(kind)

    def page(self, number: int) -> Asked:
        row, body = self.pages[number]
        payload = self.post(row.path, body, KEYS[0], **row.headers)
        return Asked("page", row.dialect, payload, is_stream=True, said=self.known.get(number))

    def _fresh(self, kind: str) -> Asked:
        rng, number = self._rng, self._rng.randrange(FRESH)
        drawn = list(PATHS)[number % len(PATHS)]
        dialect = {"stored": "responses", "slow reader": "chat"}.get(kind, drawn)
        tokens = 300 if kind in ("leaving", "slow reader") else rng.randint(2, 12)
        more, manner, allowed = OWN.get(kind, ({}, Manner(), ANSWERED))
        body = body_of(dialect, words(number), tokens) | {"stream": rng.random() < 0.5} | more
        if kind == "leaving":
            manner = Manner(rng.random(), rng.random() < 0.5, rng.choice((0.5, 1.0, 1.0, 1.0)))
        payload = self.post(PATHS[dialect], body, "not-a-key" if kind == "wrong key" else "")
        return Asked(kind, dialect, payload, allowed, body["stream"], manner)

    def post(self, path: str, body: Body | bytes, key: str = "", **headers: str) -> bytes:
        """Return a whole request, of any of the keys unless one is given."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = headers or {"x-session-id": f"s{self._rng.randrange(2)}"}
        headers |= {"content-type": "application/json", "content-length": str(len(content))}
        return self._head("POST", path, key, **headers) + content

    def _head(self, method: str, path: str, key: str = "", **headers: str) -> bytes:
        headers |= {
            **{"host": f"127.0.0.1:{self._port}", "connection": "close"},
            "authorization": f"Bearer {key or self._rng.choice(KEYS)}",
        }
        rows = [f"{method} {path} HTTP/1.1", *(f"{name}: {told}" for name, told in headers.items())]
        return "\r\n".join([*rows, "", ""]).encode()

    # ------------------------------------------------------------ sending

    async def learn(self, forget: Callable[[], Awaitable[Any]]) -> None:
        """Ask each page of an empty cache, which `forget` makes, and keep the answers."""
        for number in range(len(self.pages)):
            await forget()
            end = await self.send(self.page(number))
            if end.kind == "answered":
                self.known[number] = end.said

    async def send(self, asked: Asked) -> End:
        """Send one request and enter its end; a known page has one right answer."""
        stage, began, raw = self.ledger.stage, time.monotonic(), bytearray()
        self.ledger.begun += 1
        end = await exchange(self._port, asked.payload, asked.manner, raw)
        if end.kind == "cut":  # or whole: every connection ends
            told = judge(asked.dialect, asked.is_stream, bytes(raw))
            end = End("cut", f"{end.detail} {told.detail}") if told.kind == "cut" else told
        if end.kind == "answered" and asked.said not in (None, end.said):
            end = End("wrong", f"{end.said!r} is not {asked.said!r}")
        self.ledger.note(stage, asked, end, began)
        return end


async def exchange(port: int, payload: bytes, manner: Manner, raw: bytearray) -> End:
    """Fill `raw` until the connection ends; return how: left, hung, or cut and to be judged."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        if manner.pause_s:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        try:
            async with asyncio.timeout(manner.leaves_s or END_S_MAX):
                await loop.sock_connect(sock, ("127.0.0.1", port))
                with contextlib.suppress(ConnectionError):  # there may be an answer even so
                    await loop.sock_sendall(sock, payload[: int(len(payload) * manner.sends_part)])
                    if manner.half_closes:
                        sock.shutdown(socket.SHUT_WR)
                await asyncio.sleep(manner.pause_s)
                while chunk := await loop.sock_recv(sock, 65_536):
                    raw += chunk
        except TimeoutError:
            if manner.resets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            told = f"{len(raw)} bytes came, the last {bytes(raw[-100:])!r}"
            return End("hung" if manner.leaves_s is None else "left", told)
        except OSError as error:
            return End("cut", type(error).__name__)
    return End("cut", "the end of the connection")


@contextlib.asynccontextmanager
async def loaded_server(
    seed: int, settings: Mapping[str, str], worker: str = ""
) -> AsyncIterator[tuple[OwnServer, Load]]:
    """Run a server that takes this load; what it wrote is kept where something was missed.

    Raises:
        ServerError: it does not start.
    """
    ours = {
        **{"MODEL_PATH": str(fixture_dir("qwen3", tiny=True)), "DEFAULT_THINKING": "false"},
        **{"PROXY_API_KEY": KEYS[0], "PROXY_API_KEYS": ",".join(KEYS[1:])},
    }
    server = OwnServer({**ours, **settings}, worker)
    load = Load(server.port, seed)
    try:
        await server.started()
        yield server, load
    finally:
        if load.ledger.misses:
            print(f"what the server wrote: {server.directory}")
        server.close(keeps=bool(load.ledger.misses))


# ---------------------------------------------------------------- bodies


def body_of(dialect: str, text: str, tokens: int = 16) -> Body:
    """Return a greedy request of `dialect` for an answer to `text`."""
    field = {"completions": "prompt", "responses": "input"}.get(dialect, "messages")
    said: Any = [{"role": "user", "content": text}] if field == "messages" else text
    length = "max_output_tokens" if dialect == "responses" else "max_tokens"
    return {"model": MODEL_ID, "temperature": 0, "stream": False, length: tokens, field: said}


def words(number: int) -> str:
    """Return a text that shares nothing with another number's."""
    rng = random.Random(number)
    return " ".join(str(rng.randrange(1 << 20)) for _ in range(rng.choice((10, 40, 160))))


def malformed() -> Iterator[tuple[str, bytes]]:
    """Yield (dialect, body) for bodies that must be refused, in all dialects."""
    for dialect in PATHS:
        good = body_of(dialect, "x")
        *_, length, field = good
        wrong: list[Body] = [
            *({"model": "telepathy"}, {"stream": []}, {"temperature": 10**400}),
            *({"temperature": "hot"}, {field: 7}, {field: {"a": 1}}, {field: None}),
            *({length: -3}, {length: "many"}, {length: 10**40}),
        ]
        whole = json.dumps(good).encode()
        bodies = [
            *(json.dumps(good | change).encode() for change in wrong),
            *(b"{" + whole, whole[:-1], b"", b"[" + whole + b"]", b'{"x": "\xff\xfe"}'),
            whole[:-1] + b', "%s": %s%s}' % (field.encode(), b"[" * 5_000, b"]" * 5_000),
            whole[:-1] + b', "temperature": NaN}',
        ]
        yield from ((dialect, body) for body in bodies)
