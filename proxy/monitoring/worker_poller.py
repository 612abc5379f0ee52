"""Asks the workers what they hold, once a second, while somebody looks at the dashboard.

It asks once for all listeners of a key. A session's lines are asked for again only where the
session went on.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from hearth.proxy.monitoring.recent_requests import divergence_fields
from hearth.proxy.pool.worker_pool import WorkerPool, WorkerReports
from hearth.shared.errors import RequestError
from hearth.shared.kept_json import kept_json

log = logging.getLogger(__name__)

POLL_S: Final = 1.0  # between two polls of the workers
SESSIONS_MAX: Final = 40  # whose lines are told, the most recently used
ENTRIES_MAX: Final = 40  # of the cache, the most recently used

_CACHE_FIELDS: Final = (
    *("budget_bytes", "bytes", "slots_bytes", "slots_max", "extents", "snapshots", "evictions"),
    *("memory_limit_bytes", "running_max", "vision", "evicted", "quantisation", "exact"),
    *("pressure", "idle", "speculation", "trunks"),
)
_DISK_FIELDS: Final = ("bytes_written_today", "write_bytes_per_day", "write_bytes_left")
_TURN_FIELDS: Final = (
    *("request_id", "turn", "at", "prompt", "cached", "prefilled", "source", "completion"),
    *("ttft_ms", "finish_ms", "match"),
)
_LINE_FIELDS: Final = (
    *("line", "parent", "kind", "agent", "branch_message", "turns", "tokens"),
    *("title", "client", "begun_at"),
)
_SESSION_FIELDS: Final = ("title", "client", "model", "decode_speed")


@dataclass(frozen=True, slots=True)
class SessionTree:
    """A session's lines as JSON; `signature` changes where they have changed."""

    json: bytes  # made once for all listeners
    signature: Any  # None: a worker could not tell its part, so that it is asked again


class WorkerView:
    """The workers' last reports about one key's share, for all of its listeners.

    Owner: the event loop. Invariant: it polls only while it has listeners, unless a bug of ours
    has ended that: then it shows what was until one more comes.
    """

    def __init__(
        self,
        pool: WorkerPool,
        health: Callable[[], dict[str, Any]],
        on_change: Callable[[], None],
        key: str,
    ) -> None:
        """`health` gives the body of /health; `on_change` is called when the view has changed."""
        self._pool = pool
        self._health = health
        self._key = key
        self._on_change = on_change
        self.listeners = 0
        self._polling: asyncio.Task[None] | None = None
        # Replaced when it changes, as `trees` is
        self.state: dict[str, Any] = {"workers": health()["workers"], "entries": []}
        self.trees: dict[str, SessionTree] = {}  # by session, the last used first

    def add_listener(self) -> None:
        self.listeners += 1
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll_on(), name="dashboard")

    def remove_listener(self) -> None:
        self.listeners -= 1
        assert self.listeners >= 0, (self._key, self.listeners)
        if self._polling is not None and not self.listeners:
            self._polling.cancel()

    def sessions(self, known: dict[str, SessionTree]) -> list[orjson.Fragment]:
        """Return the trees of those sessions that changed since they were told as `known`."""
        return [
            orjson.Fragment(tree.json)
            for session, tree in self.trees.items()
            if known.get(session) is not tree
        ]

    async def _poll_on(self) -> None:
        try:
            while True:
                await self._poll()
                await asyncio.sleep(POLL_S)
        except Exception:
            log.exception("the dashboard looks at the workers no more")

    async def _poll(self) -> None:
        """Ask all workers once what the key may see."""
        key = self._key
        caches, listed = await asyncio.gather(
            self._pool.ask("cache", key=key), self._pool.ask("sessions", key=key)
        )
        workers = [_worker_row(row, caches.get(row["id"])) for row in self._health()["workers"]]
        entries = _told_by(caches, "entries")
        entries.sort(key=lambda entry: float(entry.get("idle_s", 0)))
        sessions = _told_by(listed, "sessions")
        clients = {row["session"]: row["client"] for row in sessions}  # several may know one
        self.state = {
            "workers": workers,
            "prefills": self._pool.prefills(key),
            "queue": self._pool.queue(key),
            "answers": self._pool.with_askers(_told_by(caches, "answers")),
            "entries": entries[:ENTRIES_MAX],
            "held": sum(  # all entries: workers tell the last used ones only
                sum(body.get("depths", {}).values())
                for body in caches.values()
                if isinstance(body, dict)
            ),
            "sessions": dict(Counter(clients.values()).most_common()),
        }
        self._on_change()
        if any(isinstance(body, RequestError) for body in listed.values()):
            return  # what they told last is shown until all can tell
        # the lines of the sessions in use, where any has changed
        rows = sorted(sessions, key=lambda row: float(row["idle_s"]))
        labels = list(dict.fromkeys(row["session"] for row in rows))[:SESSIONS_MAX]
        trees = await asyncio.gather(*(self._tree(label, rows) for label in labels))
        found = list(zip(labels, trees, strict=True))
        if found != list(self.trees.items()):
            self.trees = dict(found)
            self._on_change()

    async def _tree(self, label: str, rows: Sequence[dict[str, Any]]) -> SessionTree:
        """Return the lines of a session, as they were where they have not changed."""
        rows = [row for row in rows if row["session"] == label]
        # what changes with each request
        sizes = ("worker", "agent", "turns", "lines", "title")
        signature = sorted(tuple(row[name] for name in sizes) for row in rows)
        tree = self.trees.get(label)
        if tree is not None and tree.signature == signature:
            return tree
        reports = await self._pool.ask("tree", label, self._key)
        is_whole = all(isinstance(body, dict) or body.status == 404 for body in reports.values())
        if tree is not None and not is_whole:
            return SessionTree(tree.json, None)
        told = _lines(label, rows, reports)
        return SessionTree(kept_json(told), signature if is_whole else None)


def _worker_row(
    row: dict[str, Any], report: dict[str, Any] | RequestError | None
) -> dict[str, Any]:
    """Return a worker's row of /health, with its part of /v1/cache or why there is none."""
    if not isinstance(report, dict):
        return row | {"cache": None, "problem": str(report) if report is not None else None}
    cache = _fields(report, _CACHE_FIELDS)
    cache["busy_slots"] = sum(slot["busy"] for slot in report.get("slots", []))
    if report.get("disk"):
        cache["disk"] = _fields(report["disk"], _DISK_FIELDS)
    return row | {"cache": cache, "problem": None}


def _told_by(reports: WorkerReports, name: str) -> list[dict[str, Any]]:
    """Return the rows that all workers tell under `name`, each with its worker."""
    return [
        row | {"worker": worker_id}
        for worker_id, body in reports.items()
        if isinstance(body, dict)
        for row in body.get(name, [])
    ]


def _lines(label: str, rows: Sequence[dict[str, Any]], reports: WorkerReports) -> dict[str, Any]:
    """Return a session by its `rows`, the last used first, and its lines from every worker.

    It is called as its main agent's part; several workers may tell the same of it.
    """
    lines = [
        _fields(line, _LINE_FIELDS)
        | {
            "worker": line["worker"],
            "requests": [
                _fields(row, _TURN_FIELDS)
                | {"divergence": divergence_fields(row.get("divergence"))}
                for row in line["requests"]
            ],
        }
        for line in _told_by(reports, "lines")
    ]
    main = next((row for row in rows if not row["agent"]), rows[0])
    mine = [row for row in rows if row["worker"] == main["worker"]]
    return {
        "session": label,
        "used_at": time.time() - float(rows[0]["idle_s"]),
        "begun_at": min((row["begun_at"] for row in mine if row["begun_at"]), default=None),
        "lost": sum(row["lost"] for row in mine),
        **_fields(main, _SESSION_FIELDS),
        "lines": lines,
    }


def _fields(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: row[name] for name in names if name in row}
