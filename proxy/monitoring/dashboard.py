"""Serves `/dashboard`: the page, its files, the sign-in and the events.

Pages receive each request at its end, and the workers' state whenever it changes. While a page
listens, the workers are polled once per second for each API key. A session's lines are requested
again only if the session has changed. All listeners of an API key get the same events; a listener
has no other state than how far it has read.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from hearth.proxy.api.server_sent_events import sse_event
from hearth.proxy.http.browser_pages import HTML, BrowserSignIns, PageFiles, form_key, page_headers
from hearth.proxy.http.http_exchange import ClientGone, HttpExchange, wrong_method
from hearth.proxy.monitoring.recent_requests import RecentRequests, divergence_fields
from hearth.proxy.pool.worker_pool import WorkerPool, WorkerReports
from hearth.proxy.request.session_id import api_key_digest
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.kept_json import kept_json

log = logging.getLogger(__name__)

POLL_S: Final = 1.0  # pause between two polls of the workers
SESSIONS_MAX: Final = 40  # most recently used sessions, shown with their lines
ENTRIES_MAX: Final = 40  # most recently used cache entries, which are shown

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
    """A session's lines as JSON; `signature` changes when the lines change."""

    json: bytes  # encoded once for all listeners
    signature: Any  # None = a worker's part is missing, so the lines are requested again


class WorkerView:
    """The workers' last reports about one API key's share, for all of its listeners.

    Owner: the event loop. Invariant: the workers are polled only while the view has listeners. If a
    bug ends the polling, the view keeps the last state until another listener comes.
    """

    def __init__(
        self,
        pool: WorkerPool,
        health: Callable[[], dict[str, Any]],
        on_change: Callable[[], None],
        api_key: str,
    ) -> None:
        """`health` gives the body of /health; `on_change` is called when the view has changed."""
        self._pool = pool
        self._health = health
        self._api_key = api_key
        self._on_change = on_change
        self.listeners = 0
        self._polling: asyncio.Task[None] | None = None
        # `state` and `trees` are replaced when they change, never modified.
        self.state: dict[str, Any] = {"workers": health()["workers"], "entries": []}
        self.trees: dict[str, SessionTree] = {}  # by session, the most recently used first

    def add_listener(self) -> None:
        self.listeners += 1
        if self._polling is None or self._polling.done():
            self._polling = asyncio.create_task(self._poll_on(), name="dashboard")

    def remove_listener(self) -> None:
        self.listeners -= 1
        assert self.listeners >= 0, (self._api_key, self.listeners)
        if self._polling is not None and not self.listeners:
            self._polling.cancel()

    def sessions(self, known: dict[str, SessionTree]) -> list[orjson.Fragment]:
        """Return the trees of the sessions that changed since `known` was sent."""
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
        """Request what the API key may see from all workers, once."""
        api_key = self._api_key
        caches, listed = await asyncio.gather(
            self._pool.ask("cache", api_key=api_key), self._pool.ask("sessions", api_key=api_key)
        )
        workers = [_worker_row(row, caches.get(row["id"])) for row in self._health()["workers"]]
        entries = _reported_rows(caches, "entries")
        entries.sort(key=lambda entry: float(entry.get("idle_s", 0)))
        sessions = _reported_rows(listed, "sessions")
        clients = {
            row["session"]: row["client"] for row in sessions
        }  # several workers may know a session
        self.state = {
            "workers": workers,
            "prefills": self._pool.prefills(api_key),
            "queue": self._pool.queue(api_key),
            "answers": self._pool.with_requesters(_reported_rows(caches, "answers")),
            "entries": entries[:ENTRIES_MAX],
            "held": sum(  # all entries, though workers list only the last used
                sum(body.get("depths", {}).values())
                for body in caches.values()
                if isinstance(body, dict)
            ),
            "sessions": dict(Counter(clients.values()).most_common()),
        }
        self._on_change()
        if any(isinstance(body, RequestError) for body in listed.values()):
            return  # the last trees are shown until all workers report
        # Of the last used sessions, the changed ones are requested again.
        rows = sorted(sessions, key=lambda row: float(row["idle_s"]))
        labels = list(dict.fromkeys(row["session"] for row in rows))[:SESSIONS_MAX]
        trees = await asyncio.gather(*(self._tree(label, rows) for label in labels))
        found = list(zip(labels, trees, strict=True))
        if found != list(self.trees.items()):
            self.trees = dict(found)
            self._on_change()

    async def _tree(self, label: str, rows: Sequence[dict[str, Any]]) -> SessionTree:
        """Return the lines of a session; an unchanged session keeps its tree."""
        rows = [row for row in rows if row["session"] == label]
        # fields that change with each request
        sizes = ("worker", "agent", "turns", "lines", "title")
        signature = sorted(tuple(row[name] for name in sizes) for row in rows)
        tree = self.trees.get(label)
        if tree is not None and tree.signature == signature:
            return tree
        reports = await self._pool.ask("tree", label, self._api_key)
        is_whole = all(isinstance(body, dict) or body.status == 404 for body in reports.values())
        if tree is not None and not is_whole:
            return SessionTree(tree.json, None)
        lines = _lines(label, rows, reports)
        return SessionTree(kept_json(lines), signature if is_whole else None)


def _worker_row(
    row: dict[str, Any], report: dict[str, Any] | RequestError | None
) -> dict[str, Any]:
    """Return a worker's row of /health with its part of /v1/cache, or why that is missing."""
    if not isinstance(report, dict):
        return row | {"cache": None, "problem": str(report) if report is not None else None}
    cache = _fields(report, _CACHE_FIELDS)
    cache["busy_slots"] = sum(slot["busy"] for slot in report.get("slots", []))
    if report.get("disk"):
        cache["disk"] = _fields(report["disk"], _DISK_FIELDS)
    return row | {"cache": cache, "problem": None}


def _reported_rows(reports: WorkerReports, name: str) -> list[dict[str, Any]]:
    """Return the rows that all workers report under `name`, each with its worker."""
    return [
        row | {"worker": worker_id}
        for worker_id, body in reports.items()
        if isinstance(body, dict)
        for row in body.get(name, [])
    ]


def _lines(label: str, rows: Sequence[dict[str, Any]], reports: WorkerReports) -> dict[str, Any]:
    """Return a session made of its `rows`, the last used first, and its lines from every worker.

    Title and client are those of the main agent. Several workers may report the same session.
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
        for line in _reported_rows(reports, "lines")
    ]
    main = next((row for row in rows if not row["agent"]), rows[0])
    main_rows = [row for row in rows if row["worker"] == main["worker"]]
    return {
        "session": label,
        "used_at": time.time() - float(rows[0]["idle_s"]),
        "begun_at": min((row["begun_at"] for row in main_rows if row["begun_at"]), default=None),
        "lost": sum(row["lost"] for row in main_rows),
        **_fields(main, _SESSION_FIELDS),
        "lines": lines,
    }


def _fields(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: row[name] for name in names if name in row}


LISTENERS_MAX: Final = 16


class DashboardFeed:
    """Sends listeners a snapshot, then the changes. Owner: the event loop.

    Invariant: at most LISTENERS_MAX listen, and workers are polled only while a page listens.
    """

    def __init__(
        self, pool: WorkerPool, health: Callable[[], dict[str, Any]], requests: RecentRequests
    ) -> None:
        """`health` gives the body of /health."""
        self.requests = requests
        self._view_of = functools.partial(WorkerView, pool, health, self._wake)
        # Kept for one key: figures of sessions
        self._views: dict[str, WorkerView] = {}
        self._changed = asyncio.Event()  # set, and replaced, at each change
        self._is_closed = False
        requests.on_change = self._wake

    @property
    def listeners(self) -> int:
        return sum(view.listeners for view in self._views.values())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """End every stream because the server stops."""
        self._is_closed = True
        self._wake()

    @contextlib.contextmanager
    def listening(self, api_key: str) -> Iterator[AsyncGenerator[bytes, None]]:
        """Give the events for `api_key` (a digest): a snapshot at once, then the changes.

        Raises:
            Overloaded: LISTENERS_MAX listen already.
        """
        if self.listeners >= LISTENERS_MAX:
            raise Overloaded(
                f"{self.listeners} pages show the dashboard and this server tells "
                f"{LISTENERS_MAX}. Close one, and load this one again."
            )
        view = self._views.setdefault(api_key, self._view_of(api_key))
        view.add_listener()
        try:
            yield self._events(api_key, view)
        finally:
            view.remove_listener()
            if not view.listeners:
                del self._views[api_key]

    async def _events(self, api_key: str, view: WorkerView) -> AsyncGenerator[bytes, None]:
        """Yield the snapshot and the changes, each once, until the server stops."""
        totals = self.requests.of(api_key)
        number, sent_totals = totals.requests, totals.totals()
        state, trees = view.state, view.trees
        yield sse_event(
            "snapshot",
            {
                "requests": list(totals.rows),
                "totals": sent_totals,
                "state": state,
                "sessions": view.sessions({}),
            },
        )
        while not self._is_closed:
            changed = self._changed
            if (sums := totals.totals()) != sent_totals:
                rows = [row for row in totals.rows if row["number"] > number]
                number, sent_totals = totals.requests, sums
                yield sse_event("requests", {"requests": rows, "totals": sent_totals})
            elif view.state is not state:
                state = view.state
                yield sse_event("state", {"state": state})
            elif view.trees is not trees:
                known, trees = trees, view.trees
                changes = {"order": list(trees), "sessions": view.sessions(known)}
                yield sse_event("sessions", changes)
            else:
                await changed.wait()


PATH: Final = "/dashboard"
SEND_WAIT_S_MAX: Final = 20.0  # a page that takes no event for longer loses its stream
_WRONG: Final = b"<!--wrong-->"  # where the sign-in page reports a refused key
_WRONG_TEXT: Final = b'<p id="wrong" role="alert">This key is not accepted.</p>'


class Dashboard:
    """Serves all paths under PATH, and checks keys and sign-ins itself. Owner: the event loop."""

    def __init__(self, feed: DashboardFeed, sign_ins: BrowserSignIns) -> None:
        self._feed = feed
        self._sign_ins = sign_ins
        self.files = PageFiles(Path(__file__).parent / "pages", PATH)

    @staticmethod
    def serves(exchange: HttpExchange) -> bool:
        """Return whether the request is for a path under PATH."""
        return exchange.path == PATH or exchange.path.startswith(PATH + "/")

    async def serve(self, exchange: HttpExchange) -> None:
        """Answer a request under PATH whose Host and Origin were checked.

        Raises:
            RequestError: 401 without a key, 404, 405, 413, or 503 if too many listen.
        """
        exchange.reply_headers += page_headers()
        path = exchange.path.rstrip("/")
        if path == f"{PATH}/login":
            await self._log_in(exchange)
            return
        if exchange.method not in ("GET", "HEAD"):
            raise wrong_method(exchange, "GET, HEAD")
        if path == PATH:
            is_known = await self._api_key_of(exchange) is not None
            await self.files.send_page(exchange, "index" if is_known else "login")
        elif path == f"{PATH}/events":
            await self._events(exchange)
        elif self.files.holds(path):
            await self.files.send(exchange, path)
        else:
            text = f"{exchange.path!r:.120} is not served here."
            raise RequestError(text, status=404, code="not_found")

    async def _api_key_of(self, exchange: HttpExchange) -> str | None:
        """Return the digest of the request's API key; "" if none is needed, None if missing."""
        try:
            key = await self._sign_ins.identity(exchange)
        except RequestError:
            return None
        return api_key_digest({"x-api-key": key}) if key else ""

    async def _log_in(self, exchange: HttpExchange) -> None:
        """Set a cookie for a valid key, and redirect to the page."""
        if exchange.method != "POST":
            raise wrong_method(exchange, "POST")
        key = await form_key(exchange)
        try:
            await self._sign_ins.sign_in(exchange, key)
        except RequestError:
            page = self.files.page("login").replace(_WRONG, _WRONG_TEXT)
            await exchange.send_whole(401, page, HTML)
            return
        exchange.reply_headers.append((b"location", PATH.encode()))
        await exchange.send_whole(303, b"", HTML)

    async def _events(self, exchange: HttpExchange) -> None:
        """Send the events until the page leaves or stops reading."""
        if exchange.method != "GET":
            raise wrong_method(exchange, "GET")
        api_key = await self._api_key_of(exchange)
        if api_key is None:
            text = f"Sign in at {PATH}, or send a key as the API takes it."
            raise RequestError(text, status=401, code="invalid_api_key")
        exchange.keep_slot()
        with self._feed.listening(api_key) as events:
            sending = exchange.send_events(events, SEND_WAIT_S_MAX)
            try:
                await exchange.while_connected(sending)
            except ClientGone:
                pass  # every page leaves in the end; this is no abandoned answer
            except TimeoutError:
                log.info("a dashboard has read nothing for %g s: ended", SEND_WAIT_S_MAX)
