"""Numbers what rank 0 holds of KV, so that every rank finds its own part of it by the number.

What rank 0 lets go of, on whatever thread, is told with the next operation: followers hold nothing
longer than rank 0 does, but for that.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx

from hearth.worker.kv.quantise_kv import (
    KVRows,
    LayerRows,
    LayerStates,
    PackedFormat,
    QuantFormat,
    TurboFormat,
)
from hearth.worker.ranks.rank_link import Handle, Value
from hearth.worker.ranks.transport.leader_link import LeaderLink

EMPTY_HANDLE = Handle(0)  # of rows and states of no layer: each rank makes its own


class NamedCache(list[Any]):
    """A live cache, as `make_prompt_cache` gives it."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, layers: Iterable[Any], handle: Handle) -> None:
        super().__init__(layers)
        self.handle = handle


@dataclass(frozen=True, slots=True, weakref_slot=True)
class NamedRows(KVRows):
    handle: Handle = field(kw_only=True)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class NamedStates(LayerStates):
    handle: Handle = field(kw_only=True)


Named = TypeVar("Named", NamedCache, NamedRows, NamedStates)


class NamedRun(tuple[LayerRows, ...]):
    """Views of rows, and where they are: [handle, start, end] of a live cache or of kept rows.

    It holds what it views: else that might be evicted, and its number dropped on every rank, before
    the views are used.
    """

    source: list[int]
    viewed: object

    @classmethod
    def of(cls, rows: Iterable[LayerRows], viewed: object, start: int, end: int) -> "NamedRun":
        """Return views of the rows [start, end) of `viewed`; -1 is its end."""
        run = cls(rows)
        run.source = [handle_of(viewed), start, end]
        run.viewed = viewed
        return run


class Telling:
    """Tells followers operations, with the numbers of what is gone. Owner: the inference thread.

    Anything that is numbered may go on any thread.
    """

    def __init__(self, link: LeaderLink) -> None:
        self.link = link
        self._numbers = itertools.count(EMPTY_HANDLE + 1)
        # Kept for nobody: numbers of KV
        self._gone: deque[int] = deque()
        self._told_at_look = self._told = 0  # operations

    def tell(self, name: str, *arguments: Value) -> None:
        self._told += 1
        self.link.tell(name, *arguments, drops=self._drops())

    def ask(self, name: str, *arguments: Value) -> list[Any]:
        return self.link.ask(name, *arguments, drops=self._drops())

    def is_quiet(self) -> bool:
        """Whether something has gone, and nothing was told since this was asked before."""
        is_quiet = bool(self._gone) and self._told == self._told_at_look
        self._told_at_look = self._told
        return is_quiet

    def new_handle(self) -> Handle:
        return Handle(next(self._numbers))

    def cache(self, layers: Iterable[Any], handle: Handle | None = None) -> NamedCache:
        """Return a live cache by a new number, which is to be told, or by one that was."""
        return self._watched(NamedCache(layers, handle or self.new_handle()))

    def rows(self, kept: KVRows) -> NamedRows:
        """Return kept rows by a new number, which is to be told."""
        return self._watched(NamedRows(kept.layers, handle=self.new_handle()))

    def states(self, kept: LayerStates) -> NamedStates:
        """Return a snapshot by a new number, which is to be told."""
        return self._watched(NamedStates(kept.layers, handle=self.new_handle()))

    def _watched(self, thing: Named) -> Named:
        weakref.finalize(thing, self._gone.append, thing.handle).atexit = False
        return thing

    def let_go(self, handle: Handle) -> None:
        """Have the number dropped with the next operation. Any thread."""
        self._gone.append(handle)

    def _drops(self) -> list[int]:
        return [self._gone.popleft() for _ in range(len(self._gone))]


def handle_of(thing: object) -> Handle:
    """Return the number that all ranks know a cache, rows or states by."""
    if isinstance(thing, NamedCache | NamedRows | NamedStates):
        return thing.handle
    assert isinstance(thing, KVRows | LayerStates) and not thing.layers, type(thing)
    return EMPTY_HANDLE


def told_format(form: PackedFormat | None) -> list[Value] | None:
    """Return how rows are packed, as it is told."""
    if form is None:
        return None
    if isinstance(form, QuantFormat):
        return [form.bits, form.group_size]
    assert isinstance(form, TurboFormat), form
    return [form.bits, str(form.dtype).rpartition(".")[2]]


def format_from(told: list[Any] | None) -> PackedFormat | None:
    """Return how rows are packed by what was told."""
    if told is None:
        return None
    bits, size = told
    if isinstance(size, str):
        return TurboFormat(bits, getattr(mx, size))
    return QuantFormat(bits, size)
