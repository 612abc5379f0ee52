"""Knows which worker holds whose KV, and carries it from one worker to another that lacks it.

Workers of this machine share a directory, and need nobody for that; those on other machines have
directories of their own.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from hearth.shared.kv_move_messages import (
    CHUNK_BYTES,
    HELD_NAMES_MAX,
    SEEK_NAMES_MAX,
    Chunk,
    Fetch,
    Found,
    Holds,
    KVMove,
    Seek,
)

ROUTES_MAX: Final = 16  # of one worker: it asks for four at once, and does not say that one is over
NAME_BYTES_MAX: Final = 64  # of a prefix, which takes 16 today


class Holder(Protocol):
    """A worker as the relay sees it."""

    worker_id: int

    @property
    def is_remote(self) -> bool: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def load(self) -> int: ...

    def send_kv(self, message: KVMove) -> None: ...


@dataclass(slots=True)
class _Route:
    """Whose KV goes to whom."""

    asker: int
    holder: int
    awaited: type[Found | Chunk] | None = Found  # what the holder has been asked for


class KVRelay:
    """Remembers what workers say that they hold, and passes on what they ask and send.

    It reads nothing of the KV. A worker hears only of prefixes that it names itself, and is sent
    only what it has asked for: where its holder says something else their route ends.
    Invariants: at most HELD_NAMES_MAX names and ROUTES_MAX routes of each connected worker, those
    used last; of a route at most one piece is on its way.
    Owner: the event loop.
    """

    def __init__(self, links: Mapping[int, Holder]) -> None:
        self.counts: Counter[str] = Counter()
        self._links = links
        self._held: dict[int, OrderedDict[bytes, None]] = {}  # by worker: the last told last
        self._routes: dict[str, _Route] = {}  # the last used last

    def hear(self, worker_id: int, message: KVMove) -> None:
        """Take a message of a worker."""
        if isinstance(message, Holds):
            self._note(worker_id, message)
        elif isinstance(message, Seek):
            self._seek(worker_id, message)
        else:
            self._pass_on(worker_id, message)

    def _note(self, worker_id: int, told: Holds) -> None:
        held = self._held.setdefault(worker_id, OrderedDict())
        for name in told.dropped:
            held.pop(name, None)
        for name in told.added:
            if len(name) > NAME_BYTES_MAX:
                self.counts["strays"] += 1
                continue
            held[name] = None
            held.move_to_end(name)
        while len(held) > HELD_NAMES_MAX:
            held.popitem(last=False)

    def _seek(self, worker_id: int, seek: Seek) -> None:
        """Ask the worker that holds most of the prompt, the least loaded of several."""
        names = seek.names[:SEEK_NAMES_MAX]
        holder = self._holder(worker_id, names)
        if holder is None or seek.seek_id in self._routes:
            self.counts["nowhere"] += 1
            self._send(worker_id, Found.nobody(seek.seek_id))
            return
        self.counts["sought"] += 1
        own = [seek_id for seek_id, route in self._routes.items() if route.asker == worker_id]
        if len(own) >= ROUTES_MAX:
            del self._routes[own[0]]
        self._routes[seek.seek_id] = _Route(worker_id, holder)
        held = self._held[holder]
        self._send(holder, replace(seek, names=[name for name in names if name in held]))

    def _holder(self, worker_id: int, names: Iterable[bytes]) -> int | None:
        others = self._others(worker_id)
        for name in names:
            there = [link for link in others if name in self._held.get(link.worker_id, ())]
            if there:
                return min(there, key=lambda link: (link.load, link.worker_id)).worker_id
        return None

    def _others(self, worker_id: int) -> list[Holder]:
        """Return the workers that have another directory than this one."""
        own = self._links[worker_id]
        return [
            link
            for link in self._links.values()
            if link is not own and link.is_ready and (link.is_remote or own.is_remote)
        ]

    def _pass_on(self, worker_id: int, message: Found | Fetch | Chunk) -> None:
        route = self._routes.get(message.seek_id)
        if route is None and isinstance(message, Fetch):
            self._send(worker_id, Found.nobody(message.seek_id))
            return
        if route is None or not _may_say(route, worker_id, message):
            self.counts["strays"] += 1
            if route is not None and worker_id == route.holder:
                self._end(message.seek_id, route)
            return
        self._routes[message.seek_id] = self._routes.pop(message.seek_id)
        if isinstance(message, Fetch):
            route.awaited = Chunk
            self._send(route.holder, message)
            return
        route.awaited = None
        if isinstance(message, Chunk):
            self.counts["bytes"] += len(message.data)
        else:
            message = replace(message, holder=worker_id)
        self._send(route.asker, message)

    def _end(self, seek_id: str, route: _Route) -> None:
        """Nothing more comes of a route: who asked is told so."""
        del self._routes[seek_id]
        self._send(route.asker, Found.nobody(seek_id))

    def _send(self, worker_id: int, message: KVMove) -> None:
        link = self._links.get(worker_id)
        if link is not None:
            link.send_kv(message)

    def forget(self, worker_id: int) -> None:
        """A worker is gone: who waits for its KV is told so."""
        self._held.pop(worker_id, None)
        for seek_id, route in list(self._routes.items()):
            if route.holder == worker_id:
                self.counts["lost"] += route.awaited is not None
                self._end(seek_id, route)
            elif route.asker == worker_id:
                del self._routes[seek_id]

    def clear(self) -> None:
        """The workers' caches are emptied: nothing that was told before holds any more."""
        self._held.clear()
        for seek_id, route in self._routes.items():
            self._send(route.asker, Found.nobody(seek_id))
        self._routes.clear()

    def report(self) -> dict[str, int]:
        held = sum(map(len, self._held.values()))
        return {"held": held, "routes": len(self._routes), **self.counts}


def _may_say(route: _Route, worker_id: int, message: Found | Fetch | Chunk) -> bool:
    """Whether it is this worker's turn in a route to say that."""
    if isinstance(message, Fetch):
        return worker_id == route.asker and route.awaited is None
    is_small = isinstance(message, Found) or len(message.data) <= CHUNK_BYTES
    return worker_id == route.holder and type(message) is route.awaited and is_small
