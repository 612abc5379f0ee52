"""Finds which records of one root are on disk, by chain hash."""

import threading
from collections.abc import Iterable

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_names import FileKind, FileName


class FileIndex:
    """Names and sizes of files, as last seen.

    Invariants: `_by_start` and `_by_end` hold the names in `_files`, and no empty sets;
    `bytes_used` is the sum over `_files`.
    Any thread may call any method; none blocks long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[FileName, int] = {}
        self._by_start: dict[PrefixHash, set[FileName]] = {}
        self._by_end: dict[PrefixHash, set[FileName]] = {}
        self._bytes_used = 0

    def __len__(self) -> int:
        return len(self._files)

    @property
    def bytes_used(self) -> int:
        return self._bytes_used

    def leaving(self, start: PrefixHash) -> list[FileName]:
        """Return the records of the runs that leave prefix `start`."""
        with self._lock:
            return _sorted(self._by_start.get(start, ()))

    def at(self, end: PrefixHash) -> list[FileName]:
        """Return the records of the runs that arrive at prefix `end`."""
        with self._lock:
            return _sorted(self._by_end.get(end, ()))

    def nbytes(self, name: FileName) -> int:
        """Return what a record's file counts, 0 where it is not in."""
        with self._lock:
            return self._files.get(name, 0)

    def alternatives(self, name: FileName) -> list[FileName]:
        """Return the records of the same kind at the same end: one of them is enough."""
        return [other for other in self.at(name.end) if other.kind is name.kind]

    def add(self, name: FileName, nbytes: int) -> None:
        with self._lock:
            assert nbytes > 0, (name, nbytes)
            self._bytes_used += nbytes - self._files.get(name, 0)
            self._files[name] = nbytes
            self._by_start.setdefault(name.start, set()).add(name)
            self._by_end.setdefault(name.end, set()).add(name)

    def discard(self, name: FileName) -> int:
        """Take a name out; return what its file counted, 0 where it was not in."""
        with self._lock:
            if name not in self._files:
                return 0
            size = self._files.pop(name)
            self._bytes_used -= size
            assert self._bytes_used >= 0 and (self._files or not self._bytes_used), self._bytes_used
            for index, prefix in ((self._by_start, name.start), (self._by_end, name.end)):
                names = index[prefix]
                names.discard(name)
                if not names:
                    del index[prefix]
            return size


def _sorted(names: Iterable[FileName]) -> list[FileName]:
    """Return the names, canonical ones first, rows before what needs them."""
    kinds = list(FileKind)
    return sorted(names, key=lambda name: (not name.is_canonical, kinds.index(name.kind)))
