"""Has every rank do to its KV, in memory and on disk, what rank 0 does to its own.

What rank 0 holds is numbered, so that every rank finds its own part of it by the number. What rank
0 lets go of, on whatever thread, is told with the next operation: followers hold nothing longer
than rank 0 does, but for that.

What is told has no array in it: rows are named by where they are. Each operation is local to a
rank, so that it is told before or after it is done here as suits; what it gives is told with the
number that all ranks know it by.

Each rank has files of its own under the same names. A record is read where all ranks have their
part of it; what one of them lacks, or is too slow to read, counts as missing on all.
"""

import dataclasses
import itertools
import queue
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, TypeVar

import mlx.core as mx
import numpy as np

from hearth.shared.errors import StartError
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread, OnRead, Records
from hearth.worker.disk.file_format import Array, FileName, Record
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.disk_tier import RECALL_S_MAX
from hearth.worker.kv.layer_adapters import LayerMap, UnknownCache
from hearth.worker.kv.quantise_kv import (
    KVRows,
    LayerRows,
    LayerStates,
    PackedFormat,
    QuantFormat,
    TurboFormat,
)
from hearth.worker.kv.serialise_kv import UnreadableRecord
from hearth.worker.ranks.leader_link import LeaderLink
from hearth.worker.ranks.rank_link import Handle, Value

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


@dataclass(slots=True, weakref_slot=True, eq=False)
class NamedRead:
    """A read that all ranks do, by a number that they know it by: as long as its records live."""

    handle: Handle


Named = TypeVar("Named", NamedCache, NamedRows, NamedStates, NamedRead)


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
        return self.watched(NamedCache(layers, handle or self.new_handle()))

    def rows(self, kept: KVRows) -> NamedRows:
        """Return kept rows by a new number, which is to be told."""
        return self.watched(NamedRows(kept.layers, handle=self.new_handle()))

    def states(self, kept: LayerStates) -> NamedStates:
        """Return a snapshot by a new number, which is to be told."""
        return self.watched(NamedStates(kept.layers, handle=self.new_handle()))

    def watched(self, thing: Named) -> Named:
        """Return `thing`, whose number is dropped with the operation after it has gone."""
        weakref.finalize(thing, self._gone.append, thing.handle).atexit = False
        return thing

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


FOUND_EVENT: Final = "disk_found"  # (handle of the read, whether each record is there)


def lead_disk(telling: Telling, file_store: FileStore, queue_bytes: int) -> "LeadingDiskThread":
    """Have the followers open their files of this root; return the I/O thread of rank 0.

    The smallest rank's files decide how many bytes all of them may take. On each rank `queue_bytes`
    may wait to be written.

    Raises:
        StartError: some rank has none, or may not have any; the text is its own.
    """
    hosts = telling.link.hosts
    told = (bytes(file_store.root), file_store.rule, list(hosts), queue_bytes)
    opened = telling.ask("disk_open", *told)
    for rank, (bytes_max, refusal) in enumerate(opened, 1):
        if refusal:
            raise StartError(f"Rank {rank} ({hosts[rank]}) cannot keep KV on disk: {refusal}")
        file_store.bytes_max = min(file_store.bytes_max, bytes_max)
    return LeadingDiskThread(file_store, queue_bytes, telling)


def have_taken(telling: Telling, record: Record, handle: Handle) -> None:
    """Have the followers keep their parts of a record that was read by the number `handle`.

    Raises:
        UnreadableRecord: some rank's part is none of this model's.
    """
    source = record.source
    assert isinstance(source, ReadSource), "it was read by all ranks"
    answers = telling.ask("disk_take", source.read.handle, source.index, handle)
    for rank, reason in enumerate(answers, 1):
        if reason:
            raise UnreadableRecord(f"{reason} (rank {rank})")


@dataclass(frozen=True, slots=True)
class ReadSource:
    """Where every rank finds its part of a record that was read: the `source` of rank 0's."""

    read: NamedRead
    index: int


class LeadingDiskThread(DiskThread):
    """The I/O thread of rank 0; those of the followers do what it does.

    A read is answered once all ranks have read, or RECALL_S_MAX after it was asked; until then this
    thread waits. How much waits to be written on another rank is not asked: what does not fit its
    queue is missing there.
    What `lift_limit`, `write`, `read`, `discard`, `drop`, `clear` and `report` do is told:
    inference thread only.
    """

    def __init__(self, file_store: FileStore, queue_bytes_max: int, telling: Telling) -> None:
        self._telling = telling
        # Of the reads that are open: until when they wait for followers, and whether each record is
        # there, from each that has read
        self._found: dict[Handle, tuple[float, queue.SimpleQueue[list[bool]]]] = {}
        super().__init__(file_store, queue_bytes_max)
        telling.link.on_event = self._take_event

    # ------------------------------------------------------------ what is told

    def lift_limit(self) -> None:
        self._telling.tell("disk_lift_bound")
        super().lift_limit()

    def write(self, record: Record, is_needed: bool = False) -> bool:
        if not super().write(record, is_needed):
            return False
        # Root and arrays are each rank's own.
        tokens = record.tokens.astype("<i4", copy=False).tobytes()
        told = (record.name.file_name, record.position, tokens)
        self._telling.tell("disk_write", handle_of(record.source), is_needed, *told)
        return True

    def read(self, names: Sequence[FileName], on_read: OnRead) -> bool:
        read = self._telling.watched(NamedRead(self._telling.new_handle()))
        self._found[read.handle] = monotonic() + RECALL_S_MAX, queue.SimpleQueue()
        if not super().read(names, lambda records: on_read(self._joined(read, records))):
            del self._found[read.handle]
            return False
        self._telling.tell("disk_read", read.handle, [name.file_name for name in names])
        return True

    def discard(self, name: FileName) -> None:
        self._telling.tell("disk_discard", name.file_name)
        super().discard(name)

    def drop(self, names: Iterable[FileName]) -> None:
        gone = list(names)
        self._telling.tell("disk_drop", [name.file_name for name in gone])
        super().drop(gone)

    def clear(self) -> None:
        self._telling.tell("disk_clear")
        super().clear()

    def report(self) -> dict[str, Any]:
        """Return rank 0's figures, and beside them those of each other rank."""
        hosts = self._telling.link.hosts
        others = self._telling.ask("disk_report")
        ranks = [
            {"rank": rank, "host": hosts[rank], **figures} for rank, figures in enumerate(others, 1)
        ]
        return super().report() | {"ranks": ranks}

    # ------------------------------------------------------------ what followers say

    def _take_event(self, _rank: int, name: str, arguments: list[Any]) -> None:
        """Take in what a follower has found of a read. The link's thread."""
        assert name == FOUND_EVENT, name
        handle, found = arguments
        if (waiting := self._found.get(handle)) is not None:  # else it is late
            waiting[1].put(found)

    def _joined(self, read: NamedRead, records: Records) -> Records:
        """Return rank 0's records, None where another rank lacks its part. The I/O thread."""
        (until, answers), found = self._found[read.handle], list[list[bool]]()
        try:
            while len(found) < self._telling.link.size - 1:
                found.append(answers.get(timeout=max(0.0, until - monotonic())))
        except queue.Empty:
            self.counts["reads_late"] += 1
            return [None] * len(records)
        finally:
            del self._found[read.handle]
        for index, (record, *others) in enumerate(zip(records, *found, strict=True)):
            records[index] = None
            if record is not None and all(others):
                records[index] = dataclasses.replace(record, source=ReadSource(read, index))
            elif record is not None:
                self.counts["reads_lacked_by_rank"] += 1
                super().discard(record.name)  # written anew, it comes to all ranks
        return records


def record_from(
    name: FileName, position: int, tokens: bytes, root: PrefixHash, arrays: tuple[Array, ...]
) -> Record:
    """Return a rank's own record by what was told."""
    return Record(
        root=root,
        start=name.start,
        end=name.end,
        position=position,
        tokens=np.frombuffer(tokens, "<i4").astype(np.int32),
        is_canonical=name.is_canonical,
        kind=name.kind,
        arrays=arrays,
        rule=name.rule,
    )


SAMPLE_ROWS: Final = 1 << 15  # of a live cache, by which the ranks' bytes are compared


class LeadingLayerMap(LayerMap):
    """The layer map of rank 0, whose operations the followers' do too.

    `byte_share` is how many bytes the greediest rank has for one of rank 0's.
    Owner: the inference thread.

    Raises:
        UnknownCache: no reuse is possible, with what some rank keeps.
        StartError: the ranks keep other kinds of things.
    """

    def __init__(self, probe: list[Any], telling: Telling) -> None:
        super().__init__(probe)
        self._telling = telling
        answers = telling.ask("layer_map", handle_of(probe), SAMPLE_ROWS)
        kinds = kinds_of(self)
        for rank, (unknown, theirs, _) in enumerate(answers, 1):
            if unknown:
                raise UnknownCache(f"{unknown} on rank {rank}")
            if theirs != kinds:
                raise StartError(
                    f"Rank 0 has layers that keep {_names(kinds)}, and rank {rank} ones that keep "
                    f"{_names(theirs)}: with RANK_SPLIT=pipeline each rank needs layers of each "
                    "kind. Set RANK_SPLIT=tensor, or fewer RANKS."
                )
        own = self.slot_bytes(SAMPLE_ROWS, None)
        self.byte_share = max((nbytes / own for _, _, nbytes in answers if own), default=1.0)

    # ------------------------------------------------------------ rows of every token

    def rows(self, cache: list[Any], start: int, end: int) -> tuple[LayerRows, ...]:
        return NamedRun.of(super().rows(cache, start, end), cache, start, end)

    def kept_rows(self, kept: KVRows, tokens: int | None = None) -> tuple[LayerRows, ...]:
        end = -1 if tokens is None else tokens
        return NamedRun.of(super().kept_rows(kept, tokens), kept, 0, end)

    def copy_rows(
        self, cache: list[Any], start: int, end: int, form: PackedFormat | None
    ) -> KVRows:
        kept = self._telling.rows(super().copy_rows(cache, start, end, form))
        told = (handle_of(cache), start, end, told_format(form))
        self._telling.tell("copy_rows", kept.handle, *told)
        return kept

    def put_rows(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int, rows: int
    ) -> None:
        sources = _sources(row_runs)
        self._telling.tell("put_rows", handle_of(cache), sources, position, rows)
        super().put_rows(cache, row_runs, position, rows)

    def reserve(self, cache: list[Any], rows: int) -> int:
        room = super().reserve(cache, rows)  # which depends on the memory that is free here
        self._telling.tell("reserve", handle_of(cache), rows, room)
        return room

    def quantise(self, cache: list[Any], form: QuantFormat) -> None:
        raise AssertionError("live caches over several ranks are not packed")

    def trim(self, cache: list[Any], position: int) -> None:
        self._telling.tell("trim", handle_of(cache), position)
        super().trim(cache, position)

    # ------------------------------------------------------------ windows and states

    def copy_window(self, cache: list[Any], tokens: int, behind: int = 0) -> KVRows:
        kept = self._telling.rows(super().copy_window(cache, tokens, behind))
        self._telling.tell("copy_window", kept.handle, handle_of(cache), tokens, behind)
        return kept

    def put_window(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int
    ) -> None:
        self._telling.tell("put_window", handle_of(cache), _sources(row_runs), position)
        super().put_window(cache, row_runs, position)

    def take_state(self, cache: list[Any]) -> LayerStates:
        kept = self._telling.states(super().take_state(cache))
        self._telling.tell("take_state", kept.handle, handle_of(cache))
        return kept

    def put_state(self, cache: list[Any], state: LayerStates) -> None:
        self._telling.tell("put_state", handle_of(cache), handle_of(state))
        super().put_state(cache, state)

    # ------------------------------------------------------------ what was read from disk

    def rows_from(self, record: Record) -> KVRows:
        kept = self._telling.rows(super().rows_from(record))
        have_taken(self._telling, record, kept.handle)
        return kept

    def state_from(self, record: Record) -> LayerStates:
        kept = self._telling.states(super().state_from(record))
        have_taken(self._telling, record, kept.handle)
        return kept


def kinds_of(layers: LayerMap) -> list[int]:
    """Return what decides how KV is kept: whether there are rows, states, and the window."""
    layout = layers.layout
    return [int(layout.has_rows), int(layout.has_state), layout.window]


def _names(kinds: Sequence[int]) -> str:
    names = ("rows of every token", "states", "rows of a window")
    return " and ".join(name for name, kind in zip(names, kinds, strict=True) if kind) or "nothing"


def _sources(row_runs: Sequence[tuple[LayerRows, ...]]) -> list[Any]:
    """Return where these runs are; each came from this layer map."""
    found = []
    for run in row_runs:
        assert isinstance(run, NamedRun), type(run)
        found.append(run.source)
    return found
