"""Keeps KV files over ranks: what rank 0 writes, reads or removes every rank does with its part.

Each rank has files of its own under the same names. A record is read where all ranks have their
part of it; what one of them lacks, or is too slow to read, counts as missing on all.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import numpy as np

from hearth.shared.errors import StartError
from hearth.shared.suspending_clock import awake_s
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread, OnRead
from hearth.worker.disk.file_format import Array, Record
from hearth.worker.disk.file_names import FileKind, FileName
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.disk_tier import RECALL_S_MAX
from hearth.worker.kv.serialise_kv import UnreadableRecord
from hearth.worker.ranks.named_kv import Telling, handle_of
from hearth.worker.ranks.rank_link import Handle, Value

QUEUE_EVENT: Final = "disk_queue"  # (writes taken so far, bytes that wait to be written)
LOST_EVENT: Final = "disk_lost"  # (name,): a record could not be written
FOUND_EVENT: Final = "disk_found"  # (handle of the read, whether each record is there)


def lead_disk(telling: Telling, file_store: FileStore, queue_bytes: int) -> "LeadingDiskThread":
    """Have the followers open their files of this root; return the I/O thread of rank 0.

    The smallest rank's files decide how many bytes all of them may take.

    Raises:
        StartError: some rank has none, or may not have any; the text is its own.
    """
    hosts = telling.link.hosts
    opened = telling.ask("disk_open", bytes(file_store.root), file_store.rule, list(hosts))
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


@dataclass(slots=True, weakref_slot=True, eq=False)
class NamedRead:
    """A read that all ranks do, by a number that they know it by: as long as its records live."""

    handle: Handle


@dataclass(frozen=True, slots=True)
class ReadSource:
    """Where every rank finds its part of a record that was read: the `source` of rank 0's."""

    read: NamedRead
    index: int


@dataclass(slots=True)
class _ReadOfRanks:
    """What is known of a read that some rank has not answered yet."""

    read: NamedRead
    names: Sequence[FileName]
    then: OnRead
    records: Sequence[Record | None] | None = None  # rank 0's
    found: dict[int, list[bool]] = field(default_factory=dict)  # by each follower that answered
    asked_at: float = field(default_factory=awake_s)


class LeadingDiskThread(DiskThread):
    """The I/O thread of rank 0; those of the followers do what it does.

    What followers answer comes on the link's thread. Invariants: a read is answered once all ranks
    have answered, or after RECALL_S_MAX; no rank's queue outgrows `queue_bytes_max` by more than
    what is on its way there.
    What `write`, `read`, `discard`, `drop`, `clear` and `report` do is told: inference thread only.
    """

    def __init__(self, file_store: FileStore, queue_bytes_max: int, telling: Telling) -> None:
        self._telling = telling
        # What each follower last said: writes that it has taken, and bytes that wait to be written.
        self._queues = dict.fromkeys(range(1, telling.link.size), (0, 0))
        self._writes_told = 0
        self._lost_by_followers = 0
        self._open_reads: dict[Handle, _ReadOfRanks] = {}
        super().__init__(file_store, queue_bytes_max)
        telling.link.on_event = self._take_event

    # ------------------------------------------------------------ what is told

    def takes(self, nbytes: int) -> bool:
        return self._followers_take(nbytes) and super().takes(nbytes)

    def write(self, record: Record, is_needed: bool = False) -> bool:
        if not (self._followers_take(record.nbytes) and super().write(record, is_needed)):
            return False
        with self._changed:
            self._writes_told += 1
        self._telling.tell("disk_write", handle_of(record.source), told_record(record), is_needed)
        return True

    def read(self, names: Sequence[FileName], then: OnRead) -> bool:
        read = NamedRead(self._telling.new_handle())
        handle = read.handle
        weakref.finalize(read, self._telling.let_go, handle).atexit = False
        with self._changed:
            self._open_reads[handle] = _ReadOfRanks(read, names, then)
        if not super().read(names, lambda records: self._note(handle, 0, records)):
            with self._changed:
                del self._open_reads[handle]
            return False
        self._telling.tell("disk_read", handle, list(map(told_name, names)))
        return True

    def discard(self, name: FileName) -> None:
        self._telling.tell("disk_discard", told_name(name))
        super().discard(name)

    def drop(self, names: Iterable[FileName]) -> None:
        gone = list(names)
        self._telling.tell("disk_drop", list(map(told_name, gone)))
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

    # ------------------------------------------------------------ what followers write

    @property
    def has_lost(self) -> bool:
        return self._lost_by_followers > 0 or super().has_lost

    @property
    def is_drained(self) -> bool:
        return super().is_drained and self._are_followers_drained

    def flush(self, seconds: float) -> bool:
        deadline = monotonic() + seconds
        if not super().flush(seconds):
            return False
        with self._changed:
            while not self._are_followers_drained:
                left = deadline - monotonic()
                if left <= 0 or not self._is_open:
                    return False
                self._changed.wait(left)
        return True

    @property
    def _are_followers_drained(self) -> bool:
        with self._changed:
            return all(each == (self._writes_told, 0) for each in self._queues.values())

    def _followers_take(self, nbytes: int) -> bool:
        with self._changed:
            longest = max((nbytes for _, nbytes in self._queues.values()), default=0)
            fits = longest + nbytes <= self.queue_bytes_max
            self.counts["writes_refused_rank_queue"] += not fits
            return fits

    # ------------------------------------------------------------ what followers say

    def _take_event(self, rank: int, name: str, arguments: list[Any]) -> None:
        """Take in what a follower says of its files. The link's thread."""
        if name == FOUND_EVENT:
            handle, found = arguments
            self._note(Handle(handle), rank, found)
        elif name == QUEUE_EVENT:
            with self._changed:
                self._queues[rank] = (arguments[0], arguments[1])
                self._changed.notify_all()
        else:
            assert name == LOST_EVENT, name
            (told,) = arguments
            with self._changed:
                self._lost_by_followers += 1
                self.counts["writes_lost_by_rank"] += 1
            super().drop([name_from(told)])  # of no use alone; it may be about to be written here

    def _note(self, handle: Handle, rank: int, said: Sequence[Any]) -> None:
        """Take in what `rank` found of a read: rank 0 its records, others whether they have any."""
        with self._changed:
            asked = self._open_reads.get(handle)
            if asked is None:
                return
            if rank:
                asked.found[rank] = list(said)
            else:
                asked.records = said
            if asked.records is None or len(asked.found) < len(self._queues):
                return
            del self._open_reads[handle]
        self._finish(asked)

    def _finish(self, asked: _ReadOfRanks) -> None:
        """Answer a read: with None where any rank has not said that it has its part."""
        own = asked.records or [None] * len(asked.names)
        records: list[Record | None] = []
        for index, record in enumerate(own):
            said = [found[index] for found in asked.found.values()]
            if record is not None and not all(said):
                self.counts["reads_lacked_by_rank"] += 1
                super().discard(record.name)  # written anew, it comes to all ranks
            is_there = record is not None and all(said) and len(said) == len(self._queues)
            source = ReadSource(asked.read, index)
            whole = dataclasses.replace(record, source=source) if record and is_there else None
            records.append(whole)
        self._guarded(lambda: asked.then(records))

    # ------------------------------------------------------------ what takes too long

    def check_deadlines(self) -> None:
        """Answer the reads for which some rank has taken too long. The I/O thread."""
        until = awake_s() - RECALL_S_MAX
        for asked in self._taken_reads(lambda asked: asked.asked_at < until):
            with self._changed:
                self.counts["reads_late"] += 1
            self._finish(asked)

    def close(self) -> None:
        super().close()
        for asked in self._taken_reads(lambda asked: True):
            self._finish(asked)

    def _taken_reads(self, is_due: Callable[[_ReadOfRanks], bool]) -> list[_ReadOfRanks]:
        with self._changed:
            due = [handle for handle, asked in self._open_reads.items() if is_due(asked)]
            return [self._open_reads.pop(handle) for handle in due]


def told_name(name: FileName) -> list[Value]:
    """Return a record's name as it is told."""
    ends = (bytes(name.start), bytes(name.end))
    return [str(name.kind), *ends, name.token_count, name.is_canonical, name.rule]


def name_from(told: list[Any]) -> FileName:
    """Return a record's name by what was told."""
    kind, start, end, token_count, is_canonical, rule = told
    ends = (PrefixHash(start), PrefixHash(end))
    return FileName(FileKind(kind), *ends, token_count, is_canonical, rule)


def told_record(record: Record) -> list[Value]:
    """Return what a record says as it is told; root and arrays are each rank's own."""
    tokens = record.tokens.astype("<i4", copy=False).tobytes()
    return [told_name(record.name), record.position, tokens]


def record_from(told: list[Any], root: PrefixHash, arrays: tuple[Array, ...]) -> Record:
    """Return a rank's own record by what was told."""
    name, position, tokens = name_from(told[0]), told[1], told[2]
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
