"""Stands in for a KV directory of real size: files have the true sizes, and no bytes in them.

`FileStore` and `DiskThread` are the project's own, with their caps, sweeps, orders and ledger. What
is replaced: a file's bytes are a hole of the true length, its record is remembered beside it, and
jobs take the time of an SSD on a simulated clock instead of a thread's.
"""

import os
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import Array, Record, _header
from hearth.worker.disk.file_names import FileName
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.serialise_kv import _KINDS, _array as _real_array
from scripts.harness.layouts.counted_layers import hollow
from scripts.harness.layouts.simulated_clock import SimulatedClock

WRITE_BYTES_PER_S: Final = 2e9  # of a Mac's SSD, about
READ_BYTES_PER_S: Final = 4e9
DTYPES: Final = {name: dtype for dtype, name in _KINDS.items()}


@dataclass(slots=True, eq=False)
class Disk:
    """What is in the files of a directory, and what was written and read. Outlives its workers."""

    records: dict[Path, Record] = field(default_factory=dict)
    written: Counter[str] = field(default_factory=Counter)  # bytes by kind of record
    read: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class HollowFile:
    """Stands for the bytes of a record's file."""

    record: Record
    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


def encode(record: Record) -> list[HollowFile]:
    """Stand in for `file_format.encode`: the same number of bytes, of which none is made."""
    return [HollowFile(record, len(_header(record)) + _data_bytes(record))]


def array_of(name: str, array: mx.array) -> Array:
    """Stand in for `serialise_kv._array`: hollow arrays of one name, shape and type are one."""
    return _array_of(name, array.shape, array.dtype)


@lru_cache(1 << 20)
def _array_of(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> Array:
    return _real_array(name, hollow(shape, dtype))


def restored(array: Array) -> mx.array:
    """Stand in for `serialise_kv._restored`: an array of the same shape and type, without bytes."""
    return hollow(array.values.shape, DTYPES[array.dtype])


def _data_bytes(record: Record) -> int:
    return sum(array.values.nbytes for array in record.arrays)


class MeteredFileStore(FileStore):
    """A FileStore that counts what it writes and reads. `disk` is set once it is made."""

    disk: Disk

    def _write(self, name: FileName, parts: list[Any]) -> None:
        self._write_bytes(name, parts)
        os.utime(self._home / name.file_name)  # by the clock of the simulation
        self.disk.written[name.kind] += sum(map(len, parts))

    def _write_bytes(self, name: FileName, parts: list[Any]) -> None:
        super()._write(name, parts)

    def get(self, name: FileName) -> Record | None:
        with suppress(FileNotFoundError):
            self.disk.read[name.kind] += os.stat(self._home / name.file_name).st_size
        return super().get(name)


class CountedFileStore(MeteredFileStore):
    """A FileStore whose files are holes. Invariant: every file that it wrote has its record."""

    def _write_bytes(self, name: FileName, parts: list[Any]) -> None:
        (hole,) = parts
        path = self._home / name.file_name
        self._home.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        os.ftruncate(handle, len(hole))
        os.close(handle)
        self.disk.records[path] = hole.record


def reader(disk: Disk) -> Any:
    """Return what stands in for `file_format.read`."""

    def read(path: Path, root: PrefixHash, name: FileName, bytes_max: int) -> Record:
        nbytes = os.stat(path).st_size
        assert nbytes <= bytes_max, (nbytes, bytes_max)
        return disk.records[path]

    return read


class CountedDiskThread(DiskThread):
    """A DiskThread without a thread: `catch_up` does the jobs whose time has come."""

    clock: SimulatedClock
    _free_at = 0.0  # when the job before the next one ended, or would have

    def _run(self) -> None:
        """Do nothing: the simulation does the jobs."""

    @property
    def due_at(self) -> float | None:
        """When the next job is done, in the clock's seconds; None without a job."""
        with self._changed:
            if self._clears or self._discards or self._drops:
                return self._free_at
            if self._reads:
                nbytes = sum(self.file_store.nbytes(name) for name in self._reads[0][0])
                return self._free_at + nbytes / READ_BYTES_PER_S
            if self._writes:
                return self._free_at + self._writes[0][0].nbytes / WRITE_BYTES_PER_S
            return None

    def takes(self, nbytes: int) -> bool:
        self.catch_up()
        return super().takes(nbytes)

    def write(self, record: Record, is_needed: bool = False) -> bool:
        self._begin()
        return super().write(record, is_needed)

    def read(self, names: Any, then: Any) -> bool:
        self._begin()
        return super().read(names, then)

    def discard(self, name: FileName) -> None:
        self._begin()
        super().discard(name)

    def drop(self, names: Iterable[FileName]) -> None:
        self._begin()
        super().drop(names)

    def clear(self) -> None:
        self._begin()
        super().clear()

    def _begin(self) -> None:
        """A job is about to come: one that finds the disk idle begins now."""
        self.catch_up()
        if self.due_at is None:
            self._free_at = self.clock.elapsed_s

    def catch_up(self) -> None:
        """Do what would be done by now."""
        while (due_at := self.due_at) is not None and due_at <= self.clock.elapsed_s:
            self._free_at = due_at
            self._step()

    def flush(self, seconds: float) -> bool:
        """Let time pass until all that is queued is written, for so long at most."""
        end = self.clock.elapsed_s + seconds
        while (due_at := self.due_at) is not None and due_at <= end:
            self.clock.advance_to(due_at)
            self.catch_up()
        return self.is_drained

    def sweep(self) -> None:
        self._guarded(self.file_store.sweep)
