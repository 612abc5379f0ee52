"""Repeats every operation on rank 0's KV, in memory and on disk, on all followers.

Rank 0 numbers its caches, rows and states: the number is a handle by which each follower finds its
own part. Handles that rank 0 releases, on any thread, are sent with the next operation, so that
followers release their parts then.

Operations carry no arrays: rows are named by handle and position. An operation is local to a rank,
so it may be sent before or after rank 0 does it. An operation names its result's handle.

Each rank has its own files under the same names. A record can be read only if all ranks have their
part of it: a part that is missing or late on one rank counts as missing on all.
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
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
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

EMPTY_HANDLE = Handle(0)  # rows and states without layers, which each rank makes itself


class NamedCache(list[Any]):
    """A live cache from `make_prompt_cache`, with its handle."""

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
    """A disk read on all ranks; its handle is valid while a record of the read lives."""

    handle: Handle


Named = TypeVar("Named", NamedCache, NamedRows, NamedStates, NamedRead)


class NamedRun(tuple[LayerRows, ...]):
    """Views of rows with their `source`: [handle, start, end] in a live cache or in kept rows.

    It keeps a reference to the viewed object: otherwise the object might be evicted, and its handle
    dropped on every rank, before the views are used.
    """

    source: list[int]
    viewed: object

    @classmethod
    def of(cls, rows: Iterable[LayerRows], viewed: object, start: int, end: int) -> "NamedRun":
        """Return views of the rows [start, end) of `viewed`; an `end` of -1 is the last row."""
        run = cls(rows)
        run.source = [handle_of(viewed), start, end]
        run.viewed = viewed
        return run


class FollowerCommands:
    """Sends operations to the followers, with the handles to drop. Owner: the inference thread.

    Numbered objects may be garbage-collected on any thread.
    """

    def __init__(self, link: LeaderLink) -> None:
        self.link = link
        self._numbers = itertools.count(EMPTY_HANDLE + 1)
        # Kept for nobody: handles of KV
        self._gone: deque[int] = deque()
        self._sent_at_look = self._sent_count = 0  # operations sent

    def send(self, name: str, *arguments: Value) -> None:
        self._sent_count += 1
        self.link.send(name, *arguments, drops=self._drops())

    def request(self, name: str, *arguments: Value) -> list[Any]:
        return self.link.request(name, *arguments, drops=self._drops())

    def is_quiet(self) -> bool:
        """Return whether handles wait to be dropped and nothing was sent since the last call."""
        is_quiet = bool(self._gone) and self._sent_count == self._sent_at_look
        self._sent_at_look = self._sent_count
        return is_quiet

    def new_handle(self) -> Handle:
        return Handle(next(self._numbers))

    def cache(self, layers: Iterable[Any], handle: Handle | None = None) -> NamedCache:
        """Return a live cache with `handle`, or with a new handle that the caller sends."""
        return self.watched(NamedCache(layers, handle or self.new_handle()))

    def rows(self, kept: KVRows) -> NamedRows:
        """Return kept rows with a new handle, which the caller sends."""
        return self.watched(NamedRows(kept.layers, handle=self.new_handle()))

    def states(self, kept: LayerStates) -> NamedStates:
        """Return a snapshot with a new handle, which the caller sends."""
        return self.watched(NamedStates(kept.layers, handle=self.new_handle()))

    def watched(self, thing: Named) -> Named:
        """Return `thing`; the first operation after its garbage collection drops its handle."""
        weakref.finalize(thing, self._gone.append, thing.handle).atexit = False
        return thing

    def _drops(self) -> list[int]:
        return [self._gone.popleft() for _ in range(len(self._gone))]


def handle_of(thing: object) -> Handle:
    """Return the handle of a cache, rows or states."""
    if isinstance(thing, NamedCache | NamedRows | NamedStates):
        return thing.handle
    assert isinstance(thing, KVRows | LayerStates) and not thing.layers, type(thing)
    return EMPTY_HANDLE


def format_fields(form: PackedFormat | None) -> list[Value] | None:
    """Return the fields of a packed format for an operation."""
    if form is None:
        return None
    if isinstance(form, QuantFormat):
        return [form.bits, form.group_size]
    assert isinstance(form, TurboFormat), form
    return [form.bits, str(form.dtype).rpartition(".")[2]]


def format_from(fields: list[Any] | None) -> PackedFormat | None:
    """Return the packed format of these fields."""
    if fields is None:
        return None
    bits, size = fields
    if isinstance(size, str):
        return TurboFormat(bits, getattr(mx, size))
    return QuantFormat(bits, size)


FOUND_EVENT: Final = "disk_found"  # (handle of the read, whether each record is there)


def lead_disk(
    commands: FollowerCommands, file_store: FileStore, queue_bytes: int
) -> "LeadingDiskThread":
    """Make the followers open their files of this root; return the I/O thread of rank 0.

    The lowest byte limit among the ranks applies to all. On each rank at most `queue_bytes` may
    wait to be written.

    Raises:
        StartError: a rank writes no files or cannot open them; the text is that rank's.
    """
    hosts = commands.link.hosts
    arguments = (bytes(file_store.root), file_store.rule, list(hosts), queue_bytes)
    opened = commands.request("disk_open", *arguments)
    for rank, (bytes_max, refusal) in enumerate(opened, 1):
        if refusal:
            raise StartError(f"Rank {rank} ({hosts[rank]}) cannot keep KV on disk: {refusal}")
        file_store.bytes_max = min(file_store.bytes_max, bytes_max)
    return LeadingDiskThread(file_store, queue_bytes, commands)


def keep_on_followers(commands: FollowerCommands, record: Record, handle: Handle) -> None:
    """Make the followers keep their parts of a record from a read; `handle` names the parts.

    Raises:
        UnreadableRecord: a rank's part does not belong to this model.
    """
    source = record.source
    assert isinstance(source, ReadSource), "it was read by all ranks"
    answers = commands.request("disk_take", source.read.handle, source.index, handle)
    for rank, reason in enumerate(answers, 1):
        if reason:
            raise UnreadableRecord(f"{reason} (rank {rank})")


@dataclass(frozen=True, slots=True)
class ReadSource:
    """The read, and the index in it, by which each rank finds its part of a record."""

    read: NamedRead
    index: int


class LeadingDiskThread(DiskThread):
    """Does disk I/O on rank 0; the followers' I/O threads repeat it.

    A read ends once all ranks have read, or RECALL_S_MAX after its request; until then this thread
    waits. Rank 0 does not know the other ranks' write queues: a record that does not fit one of
    them is missing there.
    `lift_limit`, `write`, `read`, `discard`, `drop`, `clear` and `report` send operations:
    inference thread only.
    """

    def __init__(
        self, file_store: FileStore, queue_bytes_max: int, commands: FollowerCommands
    ) -> None:
        self._commands = commands
        # For each open read: its deadline, and one list from each follower that has read. A list
        # says whether each record is there.
        self._found: dict[Handle, tuple[float, queue.SimpleQueue[list[bool]]]] = {}
        super().__init__(file_store, queue_bytes_max)
        commands.link.on_event = self._take_event

    # ------------------------------------------------------------ operations

    def lift_limit(self) -> None:
        self._commands.send("disk_lift_bound")
        super().lift_limit()

    def write(self, record: Record, is_needed: bool = False) -> bool:
        if not super().write(record, is_needed):
            return False
        # Each rank has its own root and arrays, which are not sent.
        tokens = record.tokens.astype("<i4", copy=False).tobytes()
        fields = (record.name.file_name, record.position, tokens)
        self._commands.send("disk_write", handle_of(record.source), is_needed, *fields)
        return True

    def read(self, names: Sequence[FileName], on_read: OnRead) -> bool:
        read = self._commands.watched(NamedRead(self._commands.new_handle()))
        self._found[read.handle] = monotonic() + RECALL_S_MAX, queue.SimpleQueue()
        if not super().read(names, lambda records: on_read(self._joined(read, records))):
            del self._found[read.handle]
            return False
        self._commands.send("disk_read", read.handle, [name.file_name for name in names])
        return True

    def discard(self, name: FileName) -> None:
        self._commands.send("disk_discard", name.file_name)
        super().discard(name)

    def drop(self, names: Iterable[FileName]) -> None:
        dropped = list(names)
        self._commands.send("disk_drop", [name.file_name for name in dropped])
        super().drop(dropped)

    def clear(self) -> None:
        self._commands.send("disk_clear")
        super().clear()

    def report(self) -> dict[str, Any]:
        """Return rank 0's figures, with those of each other rank under "ranks"."""
        hosts = self._commands.link.hosts
        others = self._commands.request("disk_report")
        ranks = [
            {"rank": rank, "host": hosts[rank], **figures} for rank, figures in enumerate(others, 1)
        ]
        return super().report() | {"ranks": ranks}

    # ------------------------------------------------------------ followers' events

    def _take_event(self, _rank: int, name: str, arguments: list[Any]) -> None:
        """Receive which records of a read a follower has found. The link's thread."""
        assert name == FOUND_EVENT, name
        handle, found = arguments
        if (waiting := self._found.get(handle)) is not None:  # otherwise the event is late
            waiting[1].put(found)

    def _joined(self, read: NamedRead, records: Records) -> Records:
        """Return rank 0's records, with None where another rank lacks its part. The I/O thread."""
        (until, answers), found = self._found[read.handle], list[list[bool]]()
        try:
            while len(found) < self._commands.link.size - 1:
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
                super().discard(record.name)  # the next write reaches all ranks again
        return records


def record_from(
    name: FileName, position: int, tokens: bytes, root: PrefixHash, arrays: tuple[Array, ...]
) -> Record:
    """Return a rank's own record for the fields of an operation."""
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


SAMPLE_ROWS: Final = 1 << 15  # rows of the live cache whose bytes are compared between ranks


class LeadingLayerMap(LayerMap):
    """The layer map of rank 0, which sends its operations to the followers too.

    `byte_share` is the KV bytes of the largest rank per KV byte of rank 0.
    Owner: the inference thread.

    Raises:
        UnknownCache: a rank's caches allow no reuse.
        StartError: the ranks keep different kinds of KV.
    """

    def __init__(self, probe: list[Any], commands: FollowerCommands) -> None:
        super().__init__(probe)
        self._commands = commands
        answers = commands.request("layer_map", handle_of(probe), SAMPLE_ROWS)
        kinds = kinds_of(self)
        for rank, (unknown, other_kinds, _) in enumerate(answers, 1):
            if unknown:
                raise UnknownCache(f"{unknown} on rank {rank}")
            if other_kinds != kinds:
                raise StartError(
                    f"Rank 0 has layers that keep {_names(kinds)}, and rank {rank} ones that keep "
                    f"{_names(other_kinds)}: with RANK_SPLIT=pipeline each rank needs layers of "
                    "each kind. Set RANK_SPLIT=tensor, or fewer RANKS."
                )
        own = self.slot_bytes(SAMPLE_ROWS, None)
        self.byte_share = max((nbytes / own for _, _, nbytes in answers if own), default=1.0)

    # ------------------------------------------------------------ rows of every token

    def rows(self, cache: list[Any], start: int, end: int) -> tuple[LayerRows, ...]:
        return NamedRun.of(super().rows(cache, start, end), cache, start, end)

    def kept_rows(
        self, kept: KVRows, start: int = 0, end: int | None = None
    ) -> tuple[LayerRows, ...]:
        views = super().kept_rows(kept, start, end)
        return NamedRun.of(views, kept, start, -1 if end is None else end)

    def copy_rows(
        self, cache: list[Any], start: int, end: int, form: PackedFormat | None
    ) -> KVRows:
        kept = self._commands.rows(super().copy_rows(cache, start, end, form))
        arguments = (handle_of(cache), start, end, format_fields(form))
        self._commands.send("copy_rows", kept.handle, *arguments)
        return kept

    def put_rows(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int, rows: int
    ) -> None:
        sources = _sources(row_runs)
        self._commands.send("put_rows", handle_of(cache), sources, position, rows)
        super().put_rows(cache, row_runs, position, rows)

    def reserve(self, cache: list[Any], rows: int) -> int:
        reserved = super().reserve(cache, rows)  # depends on this rank's free memory
        self._commands.send("reserve", handle_of(cache), rows, reserved)
        return reserved

    def quantise(self, cache: list[Any], form: QuantFormat) -> None:
        raise AssertionError("live caches over several ranks are not packed")

    def trim(self, cache: list[Any], position: int) -> None:
        self._commands.send("trim", handle_of(cache), position)
        super().trim(cache, position)

    # ------------------------------------------------------------ windows and states

    def copy_window(self, cache: list[Any], tokens: int, behind: int = 0) -> KVRows:
        kept = self._commands.rows(super().copy_window(cache, tokens, behind))
        self._commands.send("copy_window", kept.handle, handle_of(cache), tokens, behind)
        return kept

    def put_window(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int
    ) -> None:
        self._commands.send("put_window", handle_of(cache), _sources(row_runs), position)
        super().put_window(cache, row_runs, position)

    def take_state(self, cache: list[Any]) -> LayerStates:
        kept = self._commands.states(super().take_state(cache))
        self._commands.send("take_state", kept.handle, handle_of(cache))
        return kept

    def put_state(self, cache: list[Any], state: LayerStates, position: int) -> None:
        self._commands.send("put_state", handle_of(cache), handle_of(state), position)
        super().put_state(cache, state, position)

    # ------------------------------------------------------------ records read from disk

    def rows_from(self, record: Record) -> KVRows:
        kept = self._commands.rows(super().rows_from(record))
        keep_on_followers(self._commands, record, kept.handle)
        return kept

    def state_from(self, record: Record) -> LayerStates:
        kept = self._commands.states(super().state_from(record))
        keep_on_followers(self._commands, record, kept.handle)
        return kept


def kinds_of(layers: LayerMap) -> list[int]:
    """Return [has rows, has states, window], which decide how KV is kept."""
    layout = layers.layout
    return [int(layout.has_rows), int(layout.has_state), layout.window]


def _names(kinds: Sequence[int]) -> str:
    names = ("rows of every token", "states", "rows of a window")
    return " and ".join(name for name, kind in zip(names, kinds, strict=True) if kind) or "nothing"


def _sources(row_runs: Sequence[tuple[LayerRows, ...]]) -> list[Any]:
    """Return the sources of these runs; each run came from this layer map."""
    found = []
    for run in row_runs:
        assert isinstance(run, NamedRun), type(run)
        found.append(run.source)
    return found
