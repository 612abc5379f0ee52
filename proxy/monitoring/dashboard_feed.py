"""Streams to dashboard pages what happens: requests that end, and the workers as they change.

All listeners of a key are sent the same; a listener itself is two numbers, how far it has read.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Final

from hearth.proxy.api.answer_frames import sse_event
from hearth.proxy.monitoring.recent_requests import RecentRequests
from hearth.proxy.monitoring.worker_poller import WorkerView
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.shared.errors import Overloaded

LISTENERS_MAX: Final = 16


class DashboardFeed:
    """Sends listeners a snapshot, then what changes. Owner: the event loop.

    Invariant: at most LISTENERS_MAX listen, and workers are asked only while somebody does.
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
        """End every stream: the server stops."""
        self._is_closed = True
        self._wake()

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
        view = self._views.setdefault(key, self._view_of(key))
        view.add_listener()
        try:
            yield self._events(key, view)
        finally:
            view.remove_listener()
            if not view.listeners:
                del self._views[key]

    async def _events(self, key: str, view: WorkerView) -> AsyncGenerator[bytes, None]:
        """Yield the snapshot and the changes, each once, until the server stops."""
        totals = self.requests.of(key)
        number, told = totals.requests, totals.totals()
        state, trees = view.state, view.trees
        yield sse_event(
            "snapshot",
            {
                "requests": list(totals.rows),
                "totals": told,
                "state": state,
                "sessions": view.sessions({}),
            },
        )
        while not self._is_closed:
            changed = self._changed
            if (sums := totals.totals()) != told:
                rows = [row for row in totals.rows if row["number"] > number]
                number, told = totals.requests, sums
                yield sse_event("requests", {"requests": rows, "totals": told})
            elif view.state is not state:
                state = view.state
                yield sse_event("state", {"state": state})
            elif view.trees is not trees:
                known, trees = trees, view.trees
                changes = {"order": list(trees), "sessions": view.sessions(known)}
                yield sse_event("sessions", changes)
            else:
                await changed.wait()
