"""Sends thousands of short requests of every kind to a server, and measures what grows by them.

Rounds of requests in every dialect, whole and streamed, with tools, by several keys and sessions,
stored, refused, of the wrong key, broken off and asked of the reports; at the end of each round,
when nothing runs, resident memory, open files and threads of each process are taken, and what the
worker's stores say that they hold. MLX's arrays, and the answers that are drafted from, are taken
off the worker's memory: they have their budgets, and come and go with what is asked. What is asked
is drawn from a finite set, and each prompt comes often enough that what is remembered of it is at
its bound by half of 10,000 requests: then a store that fills up is not taken for a leak.
"""

import json
import random
import statistics
import time
from asyncio import TaskGroup, sleep
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from hearth.commands.server_client import table
from scripts.chaos.clients import CALM, Client, Ledger, Manner
from scripts.chaos.draft_tally import DraftTally, drafts_line
from scripts.chaos.judge_replies import Kind
from scripts.chaos.own_server import MB, OwnServer, ServerError
from scripts.chaos.request_bodies import LENGTHS, PATHS, TALKING, Body, fresh, malformed, pages
from scripts.fixtures.fixture_cache import fixture_dir

ROUND: Final = 250
ROUNDS_MIN: Final = 4
REST_S: Final = 2.0  # after a round, until what its connections held is given back
RAM_BUDGET_MB: Final = 8  # less than what is asked takes: KV is evicted all the time
KEYS: Final = tuple(f"soak-{number}-{'k' * 32}" for number in range(3))
TALKS: Final = 3  # conversations: a dialect has one
PAGES: Final = 2  # of a conversation, the last
FRESH: Final = 64  # prompts that share nothing
SESSIONS: Final = 2  # of a key: the 64 rows that each line of theirs remembers are there by half
ANSWER_TOKENS: Final = (2, 6)
LONG_TOKENS: Final = 200  # of an answer that nobody waits for
LEAVES_S_MAX: Final = 0.3
GROWTH_MAX: Final = 0.01  # of resident memory, over the second half
FILES_GROWTH_MAX: Final = 2.0  # likewise
# The event loop's pool starts its six at need, and AnyIO's threads leave after 10 s without work.
THREADS_GROWTH_MAX: Final = 5.0
SHARES: Final = {
    "page": 43,
    "stored": 25,  # more than the store holds, by half of 10,000 requests
    "left": 10,
    "malformed": 8,
    "fresh": 2,
    "counted": 4,
    "reported": 4,
    "wrong key": 4,
}
REPORTS: Final = ("/v1/models", "/health", "/metrics", "/v1/sessions", "/v1/cache")
ANSWERED: Final = frozenset[Kind](("answered",))
REFUSED: Final = frozenset[Kind](("refused",))
LEFT: Final = frozenset[Kind](("answered", "left"))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: what is sent, how, and which ends of it are right."""

    dialect: str  # "" = no answer of a model
    payload: bytes
    allowed: frozenset[Kind] = ANSWERED
    is_stream: bool = False
    manner: Manner = field(default_factory=Manner)


@dataclass(frozen=True, slots=True)
class Held:
    """What a process held at the end of a round."""

    requests: int  # until then
    at_s: float
    rss: int  # a worker's: beside arrays and what it drafts from
    files: int
    threads: int


class Traffic:
    """Draws requests. Owner: the event loop."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        book = pages(random.Random(seed), TALKS)
        talks = ([page for page in book if page.dialect == name] for name in TALKING)
        self._pages = [page for talk in talks for page in talk[-PAGES:]]
        self._malformed = list(malformed())

    def next(self) -> Asked:
        rng = self._rng
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        if kind == "reported":
            return Asked("", self._head("GET", rng.choice(REPORTS), rng.choice(KEYS)))
        if kind == "malformed":
            _, dialect, content = rng.choice(self._malformed)
            return Asked(dialect, self._post(PATHS[dialect], content), REFUSED)
        page = rng.choice(self._pages)
        dialect, body = page.dialect, dict(page.body)
        if kind == "counted":
            text = f"How long is {rng.randrange(TALKS)}?"
            body = {"model": body["model"], "messages": [{"role": "user", "content": text}]}
            content = json.dumps(body).encode()
            return Asked("", self._post("/v1/messages/count_tokens", content))
        return self._asked(kind, dialect, body)

    def _asked(self, kind: str, dialect: str, body: Body) -> Asked:
        rng, manner, allowed = self._rng, Manner(), ANSWERED
        length = rng.randint(*ANSWER_TOKENS)
        if kind == "fresh":
            number = rng.randrange(FRESH)
            dialect = list(PATHS)[number % len(PATHS)]
            body = fresh(random.Random(number), dialect, 10)
        if kind == "stored":
            dialect, text = "responses", f"Remember {rng.randrange(TALKS)}."
            body = {"model": body["model"], "input": text, "temperature": 0, "store": True}
        if kind == "left":
            length, allowed = LONG_TOKENS, LEFT
            leaves_s = LEAVES_S_MAX * rng.random()
            manner = Manner(leaves_s=leaves_s, resets=rng.random() < 0.5)
        body |= {LENGTHS.get(dialect, "max_tokens"): length, "stream": rng.random() < 0.5}
        key = rng.choice(KEYS)
        if kind == "wrong key":
            key, allowed = "not-a-key", REFUSED
        payload = self._post(PATHS[dialect], json.dumps(body).encode(), key)
        return Asked(dialect, payload, allowed, bool(body["stream"]), manner)

    def _post(self, path: str, content: bytes, key: str = "") -> bytes:
        return self._head("POST", path, key or self._rng.choice(KEYS), len(content)) + content

    def _head(self, method: str, path: str, key: str, size: int = 0) -> bytes:
        return (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nConnection: close\r\n"
            f"Authorization: Bearer {key}\r\nX-Session-Id: s{self._rng.randrange(SESSIONS)}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        ).encode()


async def play(server: OwnServer, requests: int, clients: int, seed: int) -> list[str]:
    """Send `requests`; print what is held after each round, and return what does not hold."""
    traffic, ledger, drafts = Traffic(server.port, seed), Ledger(), DraftTally()
    client = Client(server.port, ledger)
    held: dict[str, list[Held]] = {}
    began = time.monotonic()

    async def one_after_another(aim: int) -> None:
        while ledger.begun < aim:
            asked = traffic.next()
            await client.send(
                *(asked.dialect, asked.payload, asked.manner, asked.allowed),
                wanted=(asked.is_stream, None),
            )

    for aim in (*range(ROUND, requests, ROUND), requests):
        async with TaskGroup() as group:
            for _ in range(clients):
                group.create_task(one_after_another(aim))
        await sleep(REST_S)
        rows = (await server.cache()).get("workers", [])
        drafts.take(rows)
        told, budgeted = _stored(rows)
        print(f"{aim:>7,} requests: {told}")
        for name, row in _held(server, budgeted, ledger.ended, time.monotonic() - began):
            held.setdefault(name, []).append(row)
            told = f"{row.rss / MB:.1f} MB, {row.files} files, {row.threads} threads"
            print(f"{row.requests:>7,} requests {row.at_s:5.0f} s  {name}: {told}", flush=True)
    print(table(_COLUMNS, [_growth_row(name, rows) for name, rows in held.items()]))
    print(", ".join(f"{count:,} {kind}" for kind, count in ledger.tally(CALM).ends.items()))
    print(drafts_line(drafts.total))
    return list(misses(held, ledger.misses))


def _stored(rows: Sequence[dict[str, Any]]) -> tuple[str, int]:
    """Return what the worker's stores say that they hold, and what of that has its own budget."""
    if not rows or "error" in rows[0]:
        return "the worker does not tell", 0
    (row,) = rows
    turns, files = row["sessions"], row["disk"]["files"]
    arrays = row["memory_bytes"] - row["beside_arrays_bytes"]
    kept, budget = row["bytes"] / MB, row["budget_bytes"] / MB
    told = f"{turns['turns']:,} turns of {turns['turn_bytes'] / MB:.1f} MB"
    told += f", KV {kept:.1f} of {budget:.1f} MB, {files:,} files on disk"
    drafts = row["speculation"]["bytes"]
    told += f", {drafts / MB:.1f} MB to draft from"
    return f"{told}, arrays {arrays / MB:.1f} MB", arrays + drafts


def _held(
    server: OwnServer, budgeted: int, requests: int, at_s: float
) -> Iterator[tuple[str, Held]]:
    for number, process in enumerate(server.look()):
        try:
            rss = process.memory_info().rss - (budgeted if number else 0)
            row = rss, process.num_fds(), process.num_threads()
        except psutil.Error:
            continue
        yield (f"worker {process.pid}" if number else "proxy"), Held(requests, at_s, *row)


# ---------------------------------------------------------------- reckoning

_COLUMNS: Final = ["process", "MB half", "MB last", "growth", "files", "threads"]


def growth_of(rows: Sequence[Held], name: str) -> float:
    """Return by how much a figure grows over the second half, as a straight line has it."""
    half = rows[len(rows) // 2 - 1 :]
    values = [getattr(row, name) for row in half]
    slope, _ = statistics.linear_regression([row.requests for row in half], values)
    return float(slope) * (half[-1].requests - half[0].requests)


def _growth_row(name: str, rows: Sequence[Held]) -> list[str]:
    files, threads = growth_of(rows, "files"), growth_of(rows, "threads")
    half, last = rows[len(rows) // 2 - 1], rows[-1]
    share = growth_of(rows, "rss") / half.rss
    held = [f"{row.rss / MB:.1f}" for row in (half, last)]
    return [name, *held, f"{share:+.2%}", f"{files:+.1f}", f"{threads:+.1f}"]


def misses(held: dict[str, list[Held]], wrong: dict[str, int]) -> Iterator[str]:
    """Yield what does not hold, as text."""
    count = max(map(len, held.values()), default=0)
    if count < ROUNDS_MIN:
        yield f"{count} rounds of {ROUND} requests are too few to tell"
        return
    for name, rows in held.items():
        if len(rows) < count:
            yield f"{name} was not there all the time"
            continue
        share = growth_of(rows, "rss") / rows[len(rows) // 2 - 1].rss
        if share > GROWTH_MAX:
            yield f"{name}: resident memory grew by {share:.2%} in the second half"
        for what, most in (("files", FILES_GROWTH_MAX), ("threads", THREADS_GROWTH_MAX)):
            if (grown := growth_of(rows, what)) > most:
                yield f"{name}: {what} grew by {grown:.1f} in the second half"
    yield from (f"{times} times: {text}" for text, times in wrong.items())


def settings() -> dict[str, Any]:
    return {
        "MODEL_PATH": str(fixture_dir("qwen3", tiny=True)),
        "PROXY_MODEL_ID": "pocket",  # as the bodies name it
        "PROXY_API_KEY": KEYS[0],
        "PROXY_API_KEYS": ",".join(KEYS[1:]),
        "CACHE_RAM_BUDGET_MB": str(RAM_BUDGET_MB),
        "MAX_KV_SIZE_GB": "1",
    }


async def soak(requests: int, clients: int, seed: int) -> int:
    """Run it all; return 0 where nothing grows, 1 where something does, 2 without a server."""
    if requests < ROUNDS_MIN * ROUND:
        print(f"{requests} requests are too few to tell. Send {ROUNDS_MIN * ROUND:,} at least.")
        return 2
    server = OwnServer(settings())
    found = ["it was broken off"]
    try:
        await server.started()
        found = await play(server, requests, clients, seed)
    except ServerError as error:
        print(error)
        return 2
    finally:
        server.close(keeps=bool(found))
    print("verdict: " + ("MISSED: " + "; ".join(found) if found else "it held"))
    return 1 if found else 0
