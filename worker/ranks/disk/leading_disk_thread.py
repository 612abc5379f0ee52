"""Keeps KV files over ranks: what rank 0 writes, reads or removes every rank does with its part.

Each rank has files of its own under the same names. A record is read where all ranks have their
part of it; what one of them lacks, or is too slow to read, counts as missing on all.
"""

import dataclasses
import queue
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import numpy as np

from hearth.shared.errors import StartError
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread, OnRead, Records
from hearth.worker.disk.file_format import Array, FileName, Record
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.disk_tier import RECALL_S_MAX
from hearth.worker.kv.serialise_kv import UnreadableRecord
from hearth.worker.ranks.named_kv import Telling, handle_of
from hearth.worker.ranks.rank_link import Handle, Value

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


@dataclass(slots=True, weakref_slot=True, eq=False)
class NamedRead:
    """A read that all ranks do, by a number that they know it by: as long as its records live."""

    handle: Handle


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
    What `lift_bound`, `write`, `read`, `discard`, `drop`, `clear` and `report` do is told:
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

    def lift_bound(self) -> None:
        self._telling.tell("disk_lift_bound")
        super().lift_bound()

    def write(self, record: Record, is_needed: bool = False) -> bool:
        if not super().write(record, is_needed):
            return False
        self._telling.tell("disk_write", handle_of(record.source), is_needed, *told_record(record))
        return True

    def read(self, names: Sequence[FileName], then: OnRead) -> bool:
        read = NamedRead(self._telling.new_handle())
        weakref.finalize(read, self._telling.let_go, read.handle).atexit = False
        self._found[read.handle] = monotonic() + RECALL_S_MAX, queue.SimpleQueue()
        if not super().read(names, lambda records: then(self._joined(read, records))):
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


def told_record(record: Record) -> list[Value]:
    """Return what a record says as it is told; root and arrays are each rank's own."""
    tokens = record.tokens.astype("<i4", copy=False).tobytes()
    return [record.name.file_name, record.position, tokens]


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
