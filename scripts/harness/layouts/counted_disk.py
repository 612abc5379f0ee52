"""Stands in for a KV directory of real size: files have the true sizes, and no bytes in them.

`FileStore` and `DiskThread` are the project's own, with their caps, sweeps, orders and ledger. What
is replaced: a file's bytes are a hole of the true length, its record is remembered beside it, and
jobs take the time of an SSD on a simulated clock instead of a thread's.
"""

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import Array, FileName, Record, _header
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.serialise_kv import _KINDS, _array
from scripts.harness.layouts.counted_layers import hollow
from scripts.harness.layouts.simulated_clock import SimulatedClock

WRITE_BYTES_PER_S: Final = 2e9  # of a Mac's SSD, about
READ_BYTES_PER_S: Final = 4e9
DTYPES: Final = {name: dtype for dtype, name in _KINDS.items()}
NEVER: Final = float("inf")
# Stands in for `serialise_kv._array`: hollow arrays of one shape and type are one.
array_of: Final = lru_cache(1 << 20)(_array)


@dataclass(slots=True, eq=False)
class Disk:
    """What is in the files of a directory, and what was written and read. Outlives its workers."""

    records: dict[FileName, Record] = field(default_factory=dict)  # all that were ever encoded
    written: Counter[str] = field(default_factory=Counter)  # bytes by kind of record
    read: Counter[str] = field(default_factory=Counter)

    def encode(self, record: Record) -> list[range]:
        """Stand in for `file_format.encode`: the same number of bytes, of which none is made."""
        self.records[record.name] = record
        return [range(len(_header(record)) + sum(each.values.nbytes for each in record.arrays))]

    def decode(self, path: Path, root: PrefixHash, name: FileName, bytes_max: int) -> Record:
        """Stand in for `file_format.read`."""
        assert os.stat(path).st_size <= bytes_max, (path, bytes_max)
        return self.records[name]


def write_hole(handle: int, parts: Sequence[range]) -> None:
    """Stand in for `file_format.write`: the file is a hole of the true length."""
    os.ftruncate(handle, sum(map(len, parts)))


def restored(array: Array) -> mx.array:
    """Stand in for `serialise_kv._restored`: an array of the same shape and type, without bytes."""
    return hollow(array.values.shape, DTYPES[array.dtype])


class MeteredFileStore(FileStore):
    """A FileStore that counts what it writes and reads."""

    disk = Disk()  # of the simulation

    def _write(self, name: FileName, parts: list[Any]) -> None:
        super()._write(name, parts)
        os.utime(self._home / name.file_name)  # by the clock of the simulation
        self.disk.written[name.kind] += sum(map(len, parts))

    def get(self, name: FileName) -> Record | None:
        with suppress(FileNotFoundError):
            self.disk.read[name.kind] += os.stat(self._home / name.file_name).st_size
        return super().get(name)


def _caught_up(method: Any) -> Any:
    """Have what would be done by now done before `method` of a thread asks or brings a job."""

    def called(self: "CountedDiskThread", *given: Any, **named: Any) -> Any:
        self.catch_up()
        return method(self, *given, **named)

    return called


class CountedDiskThread(DiskThread):
    """A DiskThread without a thread: `catch_up` does the jobs whose time has come."""

    clock = SimulatedClock()  # of the simulation
    _free_at = 0.0  # when the job before the next one ended, or would have

    def _run(self) -> None:
        """Do nothing: the simulation does the jobs."""

    accepts, write, read = map(_caught_up, (DiskThread.accepts, DiskThread.write, DiskThread.read))
    drop, clear, discard = map(_caught_up, (DiskThread.drop, DiskThread.clear, DiskThread.discard))

    def catch_up(self) -> float:
        """Do what would be done by now; return when the next job is done, in the clock's seconds.

        A job that comes while there is none begins then.
        """
        while (due_at := self._due_at()) <= self.clock.elapsed_s:
            self._free_at = due_at
            self._step()
        if due_at == NEVER:
            self._free_at = self.clock.elapsed_s
        return due_at

    def _due_at(self) -> float:
        if self._clears or self._discards or self._drops:
            return self._free_at
        if self._reads:
            nbytes = sum(self.file_store.nbytes(name) for name in self._reads[0][0])
            return self._free_at + nbytes / READ_BYTES_PER_S
        return (
            self._free_at + self._writes[0][0].nbytes / WRITE_BYTES_PER_S if self._writes else NEVER
        )

    def flush(self, seconds: float) -> bool:
        """Let time pass until all that is queued is written, for so long at most."""
        end = self.clock.elapsed_s + seconds
        while (due_at := self.catch_up()) <= end:
            self.clock.advance(due_at - self.clock.elapsed_s)
        return self.is_drained
