"""Holds a follower's part of what rank 0 has numbered: live caches, kept rows and states.

Owner: the thread that loaded the model.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hearth.worker.disk.file_format import Record
from hearth.worker.kv.layer_adapters import LayerMap, UnknownCache, rounded
from hearth.worker.kv.quantise_kv import KVRows, LayerRows, LayerStates
from hearth.worker.ranks.leading_layer_map import kinds_of
from hearth.worker.ranks.named_kv import EMPTY_HANDLE, format_from
from hearth.worker.ranks.rank_link import Handle


class FollowedRead:
    """What this rank has of a read that all ranks do, until rank 0 lets go of it."""

    def __init__(self) -> None:
        self.records: Sequence[Record | None] = ()


class FollowedKV:
    """What a follower holds by rank 0's numbers, and the operations on it.

    Invariant: a number stands for one thing, from when it is told until it is dropped.
    """

    def __init__(self) -> None:
        self.caches: dict[Handle, list[Any]] = {}
        self.rows: dict[Handle, KVRows] = {EMPTY_HANDLE: KVRows(())}
        self.states: dict[Handle, LayerStates] = {EMPTY_HANDLE: LayerStates(())}
        self.reads: dict[Handle, FollowedRead] = {}
        self._layers: LayerMap | None = None  # rank 0 has none of a model whose KV is not kept
        self.operations: dict[str, Callable[..., Any]] = {
            "layer_map": self._map,
            "copy_rows": self._copy_rows,
            "put_rows": lambda cache, sources, position, rows: self.layers.put_rows(
                self.caches[cache], self._runs(sources), position, rows
            ),
            "reserve": self._reserve,
            "trim": lambda cache, position: self.layers.trim(self.caches[cache], position),
            "copy_window": self._copy_window,
            "put_window": lambda cache, sources, position: self.layers.put_window(
                self.caches[cache], self._runs(sources), position
            ),
            "take_state": self._take_state,
            "put_state": lambda cache, state: self.layers.put_state(
                self.caches[cache], self.states[state]
            ),
        }

    @property
    def layers(self) -> LayerMap:
        assert self._layers is not None, "rank 0 has mapped the layers before it uses them"
        return self._layers

    def drop(self, numbers: Iterable[int]) -> None:
        """Let go of what rank 0 has let go of."""
        for handle in map(Handle, numbers):
            self.caches.pop(handle, None)
            self.rows.pop(handle, None)
            self.states.pop(handle, None)
            self.reads.pop(handle, None)

    def _map(self, probe: Handle, rows: int) -> list[Any]:
        """Return why no KV of this rank can be kept, its kinds, and a live cache's bytes."""
        try:
            self._layers = LayerMap(self.caches[probe])
        except UnknownCache as unknown:
            return [str(unknown), [], 0]
        return ["", kinds_of(self._layers), self._layers.slot_bytes(rows, None)]

    def _copy_rows(
        self, handle: Handle, cache: Handle, start: int, end: int, form: list[Any] | None
    ) -> None:
        source = self.caches[cache]
        self.rows[handle] = self.layers.copy_rows(source, start, end, format_from(form))

    def _reserve(self, cache: Handle, rows: int, room: int) -> None:
        """Make room for `rows` tokens; for more, where rank 0 has."""
        self.layers.has_room = lambda _nbytes: room > rounded(rows)
        self.layers.reserve(self.caches[cache], rows)

    def _copy_window(self, handle: Handle, cache: Handle, tokens: int, behind: int) -> None:
        self.rows[handle] = self.layers.copy_window(self.caches[cache], tokens, behind)

    def _take_state(self, handle: Handle, cache: Handle) -> None:
        self.states[handle] = self.layers.take_state(self.caches[cache])

    def _runs(self, sources: Sequence[Sequence[int]]) -> list[tuple[LayerRows, ...]]:
        """Return the rows that rank 0 has named by where they are."""
        found = []
        for number, start, end in sources:
            handle = Handle(number)
            if handle in self.caches:
                found.append(self.layers.rows(self.caches[handle], start, end))
            else:
                found.append(self.layers.kept_rows(self.rows[handle], end if end >= 0 else None))
        return found
