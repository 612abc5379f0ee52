"""What the dashboard shows: the last requests, and the workers while somebody looks on.

A request is noted once, at its end. Workers are asked once a second, for as long as there is a
listener, and once for all listeners of a key. What is sent is the same for each of these; a
listener itself is two numbers, how far it has read.
"""

import asyncio
import contextlib
import logging
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from hearth.proxy.api import server_sent_events as sse
from hearth.proxy.api.multi_choice_stream import merged
from hearth.proxy.monitoring.request_metrics import prefill_speed
from hearth.proxy.pool.answer_stream import AnswerStream
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.wire_messages import Usage

log = logging.getLogger(__name__)

LISTENERS_MAX: Final = 16
LOOK_S: Final = 1.0  # between two looks at the workers
REQUESTS_MAX: Final = 200  # remembered of each key
RECENT_MAX: Final = 32  # of them, those that /v1/sessions tells
SESSIONS_MAX: Final = 12  # whose lines are told, the most recently used
ENTRIES_MAX: Final = 40  # of the cache, the most recently used

_CACHE_FIELDS: Final = (
    *("budget_bytes", "bytes", "slots_bytes", "slots_max", "extents", "snapshots", "evictions"),
    *("memory_limit_bytes", "vision"),
)
_TURN_FIELDS: Final = (
    *("request_id", "turn", "at", "prompt", "cached", "prefilled", "source", "completion"),
    "ttft_ms",
)
_DIVERGENCE_FIELDS: Final = ("cause", "rule", "lost", "token", "message", "role", "remedy")
_LINE_FIELDS: Final = ("line", "parent", "kind", "agent", "branch_message", "turns", "tokens")

Row = dict[str, Any]
Told = dict[int, Row | RequestError]  # by worker


@dataclass(slots=True)
class RequestTotals:
    """What one key's requests cost, in tokens: the same figures as of /metrics, over all kinds."""

    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=REQUESTS_MAX))
    requests: int = 0
    version: int = 0  # rises with each change
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefilled_tokens: int = 0
    completion_tokens: int = 0

    def add(self, row: Row) -> None:
        self.requests += 1
        self.version += 1
        self.rows.append(row | {"number": self.requests})

    def spend(self, usage: Usage, *, is_read: bool) -> None:
        """Count what one answer cost; its prompt too, where it `is_read` for this one."""
        self.version += 1
        self.completion_tokens += usage.completion_tokens
        if is_read:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            self.prefilled_tokens += usage.prefilled_tokens

    def since(self, number: int) -> list[Row]:
        """Return the rows after that one, of those that are remembered."""
        return [row for row in self.rows if row["number"] > number]

    def totals(self) -> Row:
        """Return the sums since the start, and what the cached tokens would have cost.

        `speed` is in tokens a second, the median of the remembered requests that read something;
        None as long as there is none.
        """
        speeds = [row["speed"] for row in self.rows if row["speed"] is not None]
        speed = statistics.median(speeds) if speeds else None
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prefilled_tokens": self.prefilled_tokens,
            "completion_tokens": self.completion_tokens,
            "hit_rate": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None,
            "speed": speed,
            "saved_s": self.cached_tokens / speed if speed else None,
        }


@dataclass(frozen=True, slots=True)
class SessionTree:
    """A session's lines as they were told. `signature` tells whether they changed since."""

    told: bytes  # JSON: made once for all listeners
    signature: Any  # None: a worker could not tell its part, so that it is asked again


@dataclass(slots=True)
class WorkerView:
    """What the workers told last about one key's share, for all its listeners."""

    listeners: int = 0
    state: Row = field(default_factory=dict)  # replaced when it changes, as `trees` is
    trees: dict[str, SessionTree] = field(default_factory=dict)  # by session, the last used first

    def sessions(self, known: dict[str, SessionTree]) -> list[orjson.Fragment]:
        """Return the trees of those sessions that changed since they were told as `known`."""
        return [
            orjson.Fragment(tree.told)
            for session, tree in self.trees.items()
            if known.get(session) is not tree
        ]


class DashboardFeed:
    """Remembers how requests ended and tells listeners. Owner: the event loop.

    Invariant: workers are asked only while there is a listener.
    """

    def __init__(self, pool: WorkerPool, health: Callable[[], Row], *, is_apart: bool) -> None:
        """`health` gives the body of /health; `is_apart`: each key sees its own requests only."""
        self._pool = pool
        self._health = health
        self._is_apart = is_apart
        self._ledgers: dict[str, RequestTotals] = {}
        self._views: dict[str, WorkerView] = {}
        self._changed = asyncio.Event()  # set, and replaced, at each change
        self._looker: asyncio.Task[None] | None = None
        self._is_closed = False
        self.dropped = 0  # listeners that did not read

    @property
    def is_looking(self) -> bool:
        return self._looker is not None and not self._looker.done()

    @property
    def listeners(self) -> int:
        return sum(view.listeners for view in self._views.values())

    def whose(self, key: str) -> str:
        """Return whose requests the holder of `key`, a digest, may see; "" = everyone's."""
        return key if self._is_apart else ""

    def note(
        self,
        request: ParsedRequest,
        answers: Sequence[AnswerStream],
        started: float,
        broken: RequestError | None = None,
    ) -> None:
        """Remember a request at its end; it came at `started` (monotonic).

        `answers` are those to its choices, of which each prompt counts once. `broken` is why the
        reply did not get out.
        """
        ledger = self._ledger(self.whose(answers[0].key))
        row = _request_row(request, answers, broken)
        row["wall_ms"] = round((time.monotonic() - started) * 1000)
        ledger.add(row)
        for index, answer in enumerate(answers):
            if answer.usage is not None:
                ledger.spend(answer.usage, is_read=index % request.choices == 0)
        self._wake()

    def spent(self, usage: Usage, key: str, *, is_read: bool) -> None:
        """Add what a request has cost to the sums of `key`: it was noted when its client left."""
        self._ledger(self.whose(key)).spend(usage, is_read=is_read)
        self._wake()

    def recent(self, key: str) -> list[Row]:
        """Return the last requests of `key` (of `whose`), the newest first."""
        return list(self._ledger(key).rows)[: -RECENT_MAX - 1 : -1]

    def totals(self, key: str) -> Row:
        """Return what all requests of `key` (of `whose`) cost since the start."""
        return self._ledger(key).totals()

    def _ledger(self, key: str) -> RequestTotals:
        return self._ledgers.setdefault(key, RequestTotals())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """End every stream: the server stops."""
        self._is_closed = True
        self._stop_looking()
        self._wake()

    # ------------------------------------------------------------ who listens

    @contextlib.contextmanager
    def listening(self, key: str) -> Iterator[AsyncGenerator[bytes, None]]:
        """Give the events for `key` (of `whose`): a snapshot at once, then what changes.

        Raises:
            Overloaded: LISTENERS_MAX listen.
        """
        if self.listeners >= LISTENERS_MAX:
            raise Overloaded(
                f"{self.listeners} pages show the dashboard and this server tells "
                f"{LISTENERS_MAX}. Close one, and load this one again."
            )
        view = self._views.setdefault(key, WorkerView())
        view.listeners += 1
        if not self.is_looking and not self._is_closed:
            self._looker = asyncio.create_task(self._look_on(), name="dashboard")
            self._looker.add_done_callback(_tell_bug)
        try:
            yield self._events(key, view)
        finally:
            view.listeners -= 1
            if not view.listeners:
                del self._views[key]
            if not self._views:
                self._stop_looking()

    def _stop_looking(self) -> None:
        if self._looker is not None:
            self._looker.cancel()
            self._looker = None

    async def _events(self, key: str, view: WorkerView) -> AsyncGenerator[bytes, None]:
        """Yield the snapshot and the changes, each once, until the server stops."""
        ledger = self._ledger(key)
        number, spent = ledger.requests, ledger.version
        state, trees = view.state, view.trees
        yield sse.event(
            "snapshot",
            {
                "requests": list(ledger.rows),
                "totals": ledger.totals(),
                "state": state or {"workers": self._health()["workers"], "entries": []},
                "sessions": view.sessions({}),
            },
        )
        while not self._is_closed:
            changed = self._changed
            if ledger.version > spent:
                rows, number, spent = ledger.since(number), ledger.requests, ledger.version
                yield sse.event("requests", {"requests": rows, "totals": ledger.totals()})
            elif view.state is not state:
                state = view.state
                yield sse.event("state", {"state": state})
            elif view.trees is not trees:
                known, trees = trees, view.trees
                told = {"order": list(trees), "sessions": view.sessions(known)}
                yield sse.event("sessions", told)
            else:
                await changed.wait()

    # ------------------------------------------------------------ what the workers tell

    async def _look_on(self) -> None:
        while True:
            await asyncio.gather(*(self._look(key, view) for key, view in self._views.items()))
            await asyncio.sleep(LOOK_S)

    async def _look(self, key: str, view: WorkerView) -> None:
        """Ask all workers once what `key` may see."""
        caches, listed = await asyncio.gather(
            self._pool.ask("cache", key=key), self._pool.ask("sessions", key=key)
        )
        rows = [_worker_row(row, caches.get(row["id"])) for row in self._health()["workers"]]
        entries = [
            entry | {"worker": worker_id}
            for worker_id, body in caches.items()
            if isinstance(body, dict)
            for entry in body.get("entries", [])
        ]
        entries.sort(key=lambda entry: float(entry.get("idle_s", 0)))
        view.state = {
            "workers": rows,
            "prefills": self._pool.prefills(key),
            "queue": self._pool.queue(key),
            "entries": entries[:ENTRIES_MAX],
            "held": sum(map(_entry_count, caches.values())),
            "sessions": _session_count(listed),
        }
        self._wake()
        if any(isinstance(body, RequestError) for body in listed.values()):
            return  # what it told last is shown until it can tell
        sessions = [
            row | {"worker": worker_id}
            for worker_id, body in listed.items()
            if isinstance(body, dict)
            for row in body["sessions"]
        ]
        await self._look_at_sessions(key, view, sessions)

    async def _look_at_sessions(self, key: str, view: WorkerView, rows: Sequence[Row]) -> None:
        """Ask for the lines of the sessions in use, where any has changed."""
        rows = sorted(rows, key=lambda row: float(row["idle_s"]))
        labels = list(dict.fromkeys(row["session"] for row in rows))[:SESSIONS_MAX]
        trees = await asyncio.gather(*(self._tree(key, view, label, rows) for label in labels))
        told = list(zip(labels, trees, strict=True))
        if told != list(view.trees.items()):
            view.trees = dict(told)
            self._wake()

    async def _tree(
        self, key: str, view: WorkerView, label: str, rows: Sequence[Row]
    ) -> SessionTree:
        """Return the lines of a session, as they were where they have not changed."""
        signature = sorted(_size(row) for row in rows if row["session"] == label)
        tree = view.trees.get(label)
        if tree is not None and tree.signature == signature:
            return tree
        told = await self._pool.ask("tree", label, key)
        if _is_whole(told):
            return SessionTree(orjson.dumps(_lines(label, told)), signature)
        return SessionTree(
            tree.told if tree is not None else orjson.dumps(_lines(label, told)), None
        )


def _request_row(
    request: ParsedRequest, answers: Sequence[AnswerStream], broken: RequestError | None
) -> Row:
    """Return what is told of a request, in tokens and milliseconds; no text of it."""
    answer = next((each for each in answers if each.usage is None), answers[0])
    row: Row = {
        "id": answers[0].request_id,
        "at": round(time.time(), 3),
        "dialect": request.dialect,
        "session": request.prompt.speaker.session or "anonymous",
        "ended": answer.outcome(broken)[0],
        "prompt": answer.prompt_tokens,
        "cached": answer.cached_tokens,
        "prefilled": max(0, answer.done_tokens - answer.cached_tokens),
        **{"completion": 0, "source": "none", "speed": None, "images": 0, "divergence": None},
        **{"queue_ms": None, "ttft_ms": None, "finish_ms": None},
    }
    usages = [each.usage for each in answers if each.usage is not None]
    if len(usages) < len(answers):  # it broke off: what it cost is not told in full
        return row
    usage = merged(usages, request.choices)
    return row | {
        "prompt": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "prefilled": usage.prefilled_tokens,
        "completion": usage.completion_tokens,
        "source": usage.source,
        "queue_ms": usage.queue_ms,
        "ttft_ms": usage.ttft_ms,
        "finish_ms": usage.finish_ms,
        "speed": prefill_speed(usages[0]),
        "images": usage.image_tokens,
        "divergence": _divergence(usage.divergence),
    }


def _divergence(told: Row | None) -> Row | None:
    """Return why tokens were lost, without the text that a worker may tell with it."""
    return _fields(told, _DIVERGENCE_FIELDS) if told else None


def _worker_row(row: Row, told: Row | RequestError | None) -> Row:
    """Return a worker's row of /health, with its part of /v1/cache or why there is none."""
    if not isinstance(told, dict):
        return row | {"cache": None, "problem": str(told) if told is not None else None}
    cache = _fields(told, _CACHE_FIELDS)
    cache["busy_slots"] = sum(slot["busy"] for slot in told.get("slots", []))
    return row | {"cache": cache, "problem": None}


def _entry_count(told: Row | RequestError) -> int:
    """Return how many entries a worker keeps: it tells the last used ones only."""
    return sum(told.get("depths", {}).values()) if isinstance(told, dict) else 0


def _session_count(listed: Told) -> int:
    """Return how many sessions the workers know; one may be known to several."""
    bodies = [body for body in listed.values() if isinstance(body, dict)]
    return len({row["session"] for body in bodies for row in body["sessions"]})


def _size(row: Row) -> tuple[Any, ...]:
    """Return what changes in a session's row with each request."""
    return (row["worker"], row["agent"], row["turns"], row["lines"])


def _is_whole(told: Told) -> bool:
    """Whether each worker told its lines, or that it has none."""
    return all(isinstance(body, dict) or body.status == 404 for body in told.values())


def _lines(label: str, told: Told) -> Row:
    """Return the lines of a session, from every worker that has some."""
    lines = [
        _fields(line, _LINE_FIELDS)
        | {"worker": worker_id, "requests": [_turn(row) for row in line["requests"]]}
        for worker_id, body in told.items()
        if isinstance(body, dict)
        for line in body["lines"]
    ]
    return {"session": label, "lines": lines}


def _turn(row: Row) -> Row:
    return _fields(row, _TURN_FIELDS) | {"divergence": _divergence(row.get("divergence"))}


def _fields(row: Row, names: Sequence[str]) -> Row:
    return {name: row[name] for name in names if name in row}


def _tell_bug(looker: asyncio.Task[None]) -> None:
    """Say that a bug of ours ended the task: pages show what was until one more is opened."""
    if not looker.cancelled() and (error := looker.exception()) is not None:
        log.error("the dashboard looks at the workers no more", exc_info=error)
