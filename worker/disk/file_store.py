"""Keeps the files of one root in a directory that several workers and models share."""

import fcntl
import json
import logging
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from errno import EACCES, EDQUOT, EFBIG, ENOSPC, EPERM, EROFS
from functools import partial
from pathlib import Path
from typing import Any, Final

from hearth.shared.private_files import make_private, read_small_file
from hearth.shared.suspending_clock import awake_s
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.eviction_order import StoredFile, files_to_evict
from hearth.worker.disk.file_format import (
    TEMP_PREFIX,
    Damaged,
    FileKind,
    FileName,
    Record,
    encode,
    is_of_today,
    is_root,
    parse,
    read,
    write,
)

FILE_BYTES_MIN: Final = 64 * 1024  # least bytes that a file counts as, to limit the number of files
SLACK: Final = 0.05  # share of the limit that is freed in advance, so that sweeps stay rare
LOCK_WAIT_S_MAX: Final = 2.0
RESERVE_SHARE: Final = 4  # 1 / 4 of a day's writing is reserved for live conversations
PAUSE_S: Final = 60.0  # pause of all writes after the disk has refused a write
TOUCH_S: Final = 60.0  # resolution of the time of a file's last use
RACY_NS: Final = 2_000_000_000  # some file systems store times in steps of two seconds
DAY_S: Final = 86_400

COUNTERS_NAME: Final = ".ledger"
COUNTERS_BYTES: Final = 256  # fixed size, so that the file can be rewritten on a full disk
POLL_S: Final = 0.002
_INTEGER_MAX: Final = 1 << 62

_FULL: Final = (ENOSPC, EDQUOT, EFBIG)
_READ_ONLY: Final = (EROFS, EACCES, EPERM)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class UsageCounters:
    """The content of the directory's counter file while the directory's lock is held.

    Invariant: `bytes_used` is never less than the bytes that workers have written and not removed.
    If a user has removed a file, `bytes_used` is too large until the next sweep.
    """

    day: int = 0  # days since the epoch, UTC
    bytes_written: int = 0  # bytes written on that day
    bytes_used: int | None = None  # None = unknown, so that the files have to be counted
    changes: int = 0  # number of changes to the files; an equal number means no new listing
    handle: int = -1
    was_damaged: bool = False

    def start_day(self, day: int) -> None:
        """Reset `bytes_written` on another day, even an earlier day after a clock change."""
        if day != self.day:
            self.day, self.bytes_written = day, 0

    def save(self) -> None:
        assert self.handle >= 0, "counters are saved without their lock"
        fields = {k: v for k, v in asdict(self).items() if k not in ("handle", "was_damaged")}
        text = json.dumps(fields).encode().ljust(COUNTERS_BYTES - 1) + b"\n"
        assert len(text) == COUNTERS_BYTES, len(text)
        os.pwrite(self.handle, text, 0)


@contextmanager
def locked_counters(directory: Path, wait_s: float) -> Iterator[UsageCounters]:
    """Hold the directory's lock and yield the directory's counters.

    The system frees the lock of a dead process.

    Raises:
        TimeoutError: another worker has held the lock for `wait_s`.
        OSError: the directory can't be written.
    """
    make_private(directory)
    handle = os.open(directory / COUNTERS_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _lock(handle, wait_s)
        counters = _counters_in(os.pread(handle, COUNTERS_BYTES, 0))
        counters.handle = handle
        try:
            yield counters
        finally:
            counters.handle = -1
    finally:
        os.close(handle)


def read_counters(directory: Path) -> UsageCounters | None:
    """Return the current counters without taking the lock; None if they cannot be read."""
    try:
        text = read_small_file(directory / COUNTERS_NAME, COUNTERS_BYTES)
    except OSError:
        return None
    counters = _counters_in(text)
    return None if counters.was_damaged or not text else counters


def _lock(handle: int, wait_s: float) -> None:
    deadline = awake_s() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if awake_s() >= deadline:
                raise TimeoutError(f"another worker has held the lock for {wait_s:g} s") from error
        time.sleep(POLL_S)


def _counters_in(text: bytes) -> UsageCounters:
    if not text:
        return UsageCounters()  # a new file
    try:
        fields: Any = json.loads(text)
        used = fields["bytes_used"]
        return UsageCounters(
            _count(fields["day"]),
            _count(fields["bytes_written"]),
            None if used is None else _count(used),
            _count(fields.get("changes", 0)),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return UsageCounters(was_damaged=True)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _INTEGER_MAX:
        raise ValueError(f"{value!r} is no count")
    return value


class FileIndex:
    """The names and sizes of files, as last listed.

    Invariants: `_by_start` and `_by_end` hold the names in `_files`, and no empty sets;
    `bytes_used` is the sum over `_files`.
    Any thread may call any method; no method blocks for long.
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
        """Return the records of all extents that start at prefix `start`."""
        with self._lock:
            return _sorted(self._by_start.get(start, ()))

    def at(self, end: PrefixHash) -> list[FileName]:
        """Return the records of all extents that end at prefix `end`."""
        with self._lock:
            return _sorted(self._by_end.get(end, ()))

    def nbytes(self, name: FileName) -> int:
        """Return the counted bytes of a record's file; 0 if the file is not in the index."""
        with self._lock:
            return self._files.get(name, 0)

    def alternatives(self, name: FileName) -> list[FileName]:
        """Return the records of the same kind at the same end, any of which can replace `name`."""
        return [other for other in self.at(name.end) if other.kind is name.kind]

    def add(self, name: FileName, nbytes: int) -> None:
        with self._lock:
            assert nbytes > 0, (name, nbytes)
            self._bytes_used += nbytes - self._files.get(name, 0)
            self._files[name] = nbytes
            self._by_start.setdefault(name.start, set()).add(name)
            self._by_end.setdefault(name.end, set()).add(name)

    def discard(self, name: FileName) -> int:
        """Remove a name; return the counted bytes of the file, 0 if it was not in the index."""
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
    """Return the names in order: canonical before fast, and rows before windows and states."""
    kinds = list(FileKind)
    return sorted(names, key=lambda name: (not name.is_canonical, kinds.index(name.kind)))


class FileStore:
    """Stores records of KV as files, finds records by chain hash, and evicts files beyond a limit.

    Invariants:
      one of a kind  each prefix has one record of each kind, preferably a canonical record. Two
                     workers that write at once may leave two until the next refresh.
      capped         the files of all roots together take at most `bytes_max` after each put
      needed         the last part of a day's writing is reserved for live conversations
      lock           files are written and evicted only under the directory's lock: an unfinished
                     file found under the lock was left by a dead writer. Reads take no lock: a file
                     that is removed before the read is a miss.
    No method raises for an error of the disk or a damaged file: errors are counted, and the first
    error of each kind is logged as a warning.
    Owner: the I/O thread. Any thread may call `leaving`, `at`, `holds`, `hide`, `nbytes`,
    `bytes_used`, `is_reserved`, `is_shared` and `report`.
    """

    def __init__(
        self,
        directory: Path,
        root: PrefixHash,
        bytes_max: int,
        write_bytes_per_day: int,
        now: Callable[[], float] = time.time,
        rule: str = "",
    ) -> None:
        """List the directory, without opening any file.

        `bytes_max` is the limit of all roots in `directory` together, `write_bytes_per_day` that of
        all workers together (0 = no limit). `rule` is the label of this server's cut rule: KV that
        is canonical by another rule counts as fast.
        """
        self.counts: Counter[str] = Counter()
        self._directory = directory
        self._home = directory / root.hex()
        self.root = root
        self.rule = rule
        self.bytes_max = bytes_max
        self.write_bytes_per_day = write_bytes_per_day
        self._now = now
        self._index = FileIndex()
        self._found = self._index  # the index for lookups, empty while `clear` is awaited
        # Kept for one key: KV on disk, by the key's own root
        self._listed: dict[str, FileName] = {}  # names by file name at the last listing
        self._seen_at = 0  # the directory's mtime at the last refresh; 0 = refresh again
        self._changes_seen: int | None = None  # `UsageCounters.changes` at the last refresh
        self._paused_at = -math.inf
        self._is_full = False
        self._warned: set[str] = set()
        self._counters_seen = UsageCounters()  # the counters last read under the lock
        self.refresh()
        self.is_shared = False  # whether other workers are known to write to the directory

    # ------------------------------------------------------------ any thread

    def leaving(self, start: PrefixHash) -> list[FileName]:
        """Return the records of all extents that start at prefix `start`, canonical before fast."""
        return self._found.leaving(start)

    def at(self, end: PrefixHash) -> list[FileName]:
        """Return the records of all extents that end at prefix `end`, canonical before fast."""
        return self._found.at(end)

    def holds(self, name: FileName) -> bool:
        """Whether this record or an equally good record is stored: `put` would do nothing."""
        return bool(self._as_good_as(name))

    def nbytes(self, name: FileName) -> int:
        """Return the counted bytes of a record's file; 0 if there is no file."""
        return self._found.nbytes(name)

    def hide_all(self) -> None:
        """Hide all files from lookups until `clear` has removed them."""
        self._found = FileIndex()

    def hide(self, name: FileName) -> None:
        """Hide a record from lookups; the I/O thread removes the file later."""
        self._index.discard(name)

    @property
    def reserve(self) -> int:
        """The bytes of a day's writing that are reserved for live conversations."""
        return self.write_bytes_per_day // RESERVE_SHARE

    @property
    def is_reserved(self) -> bool:
        """Whether only the reserve of today's writing was left after the last write."""
        written = self._written_today(self._counters_seen)
        return bool(self.write_bytes_per_day) and written >= self.write_bytes_per_day - self.reserve

    @property
    def bytes_used(self) -> int:
        """The counted bytes of this root's files."""
        return self._index.bytes_used

    def _written_today(self, counters: UsageCounters) -> int:
        return counters.bytes_written if counters.day == self._day() else 0

    def report(self) -> dict[str, Any]:
        """Return the figures for `/v1/cache`. Figures named `directory_` cover all workers."""
        shared = read_counters(self._directory) or self._counters_seen
        written, per_day = self._written_today(shared), self.write_bytes_per_day
        return {
            "files": len(self._index),
            "bytes_used": self.bytes_used,
            "directory_bytes_used": shared.bytes_used,
            "bytes_max": self.bytes_max,
            "bytes_written_today": written,
            "write_bytes_per_day": per_day,
            "write_bytes_left": max(0, per_day - written) if per_day else None,
            "write_bytes_reserved": self.reserve,
            "counts": dict(self.counts),
        }

    def _as_good_as(self, name: FileName) -> list[FileName]:
        alternatives = self._found.alternatives(name)
        return [other for other in alternatives if other.is_canonical or not name.is_canonical]

    # ------------------------------------------------------------ reading

    def get(self, name: FileName) -> Record | None:
        """Return a record, or None, which counts as a miss. A damaged file is removed."""
        path = self._home / name.file_name
        try:
            record = read(path, self.root, name, self.bytes_max)
        except FileNotFoundError:
            self.counts["reads_gone"] += 1
            self._forget(name)
            return None
        except Damaged as damage:
            self.counts[f"damaged_{damage.reason}"] += 1
            self._warn(damage.reason, "%s is removed, it is damaged (%s)", path, damage)
            self._remove(name)
            return None
        except (OSError, MemoryError) as error:
            self.counts["reads_failed"] += 1
            self._warn("reads_failed", "%s can't be read: %s", path, error)
            return None
        assert record.name == name and record.root == self.root, (record.name, name)
        self.counts["reads"] += 1
        self._touch(name)
        return record

    def refresh(self) -> None:
        """List the files that other workers have written or removed. Cheap without such changes."""
        counters = read_counters(self._directory)
        changes = None if counters is None else counters.changes
        try:
            changed_at = os.stat(self._home).st_mtime_ns
            if changed_at == self._seen_at and changes == self._changes_seen:
                return
            listing = {entry.name for entry in os.scandir(self._home)}
        except FileNotFoundError:
            changed_at, listing = 0, set()
        except OSError as error:
            self.counts["scans_failed"] += 1
            self._warn("scans_failed", "%s can't be listed: %s", self._home, error)
            return
        for gone in self._listed.keys() - listing:
            self._index.discard(self._listed.pop(gone))
        for file_name in listing - self._listed.keys():
            name = parse(file_name, self.rule)
            if name is not None:
                assert name.file_name == file_name, (name, file_name)
                self.is_shared = True
                if not self._list(name):  # the file is already gone
                    self.counts["scans_missed"] += 1
        # A later change within the same clock tick would not change the mtime.
        is_past = time.time_ns() - changed_at > RACY_NS
        self._seen_at = changed_at if is_past else 0
        self._changes_seen = changes

    def _record_change(self, counters: UsageCounters) -> None:
        """Count this worker's own change, which needs no refresh. Call under the lock."""
        is_known = counters.changes == self._changes_seen
        counters.changes += 1
        counters.save()
        if is_known:
            self._changes_seen = counters.changes
            with suppress(OSError):
                self._seen_at = os.stat(self._home).st_mtime_ns

    def _list(self, name: FileName) -> bool:
        """Add the file called `name` to the index; return False if it cannot be found."""
        try:
            size = os.stat(self._home / name.file_name, follow_symlinks=False).st_size
        except OSError:
            return False
        self._listed[name.file_name] = name
        self._index.add(name, _counted_bytes(size))
        return True

    def _forget(self, name: FileName) -> None:
        self._index.discard(name)
        self._listed.pop(name.file_name, None)

    def _touch(self, name: FileName) -> bool:
        """Record that a file was used; return False if it cannot be found."""
        path = self._home / name.file_name
        try:
            if self._now() - os.stat(path).st_mtime > TOUCH_S:
                os.utime(path)
        except FileNotFoundError:
            self._forget(name)
            return False
        except OSError:  # a read-only disk records no times
            self.counts["touches_failed"] += 1
        return True

    # ------------------------------------------------------------ writing

    def put(self, record: Record, is_needed: bool = False) -> bool:
        """Write a record's file atomically; return whether it or an equally good file is stored.

        `is_needed`: a live conversation continues from the record, so the day's reserve may be
        used. Lists no directory.
        """
        assert record.root == self.root, (record.root, self.root)
        if 0 <= self._now() - self._paused_at < PAUSE_S:
            self.counts["writes_refused_paused"] += 1
            return False
        return bool(self._under_lock(partial(self._put, record, is_needed)))

    def sweep(self) -> None:
        """Evict files of all roots down to the limit; remove unfinished files of dead writers."""
        self._under_lock(self._sweep)

    def remove(self, name: FileName) -> None:
        """Remove a file that this worker cannot use, and count the directory's bytes again."""

        def remove(counters: UsageCounters) -> None:
            self._remove(name)
            self._sweep(counters)

        self.counts["unusable_removed"] += 1
        self._under_lock(remove)

    def drop(self, names: Collection[FileName]) -> None:
        """Remove files that newer files have replaced."""

        def drop(counters: UsageCounters) -> None:
            freed = sum(self._remove(name) for name in names)
            counters.bytes_used = max(0, _bytes_used(counters) - freed)
            self._record_change(counters)

        self.counts["replaced"] += len(names)
        self._under_lock(drop)

    def clear(self) -> None:
        """Remove all files of this root; files of other roots stay."""

        def remove(counters: UsageCounters) -> None:
            self.refresh()
            for name in list(self._listed.values()):
                self._remove(name)
            self._sweep(counters)

        self._under_lock(remove)
        self._found = self._index

    def _under_lock(self, act: Callable[[UsageCounters], object]) -> object:
        """Run `act` under the directory's lock and return its result; None if the disk fails."""
        try:
            with locked_counters(self._directory, LOCK_WAIT_S_MAX) as counters:
                if counters.was_damaged:
                    self.counts["ledgers_damaged"] += 1
                self._counters_seen = counters
                if counters.bytes_used is None:
                    self._sweep(counters)
                return act(counters)
        except OSError as error:
            reason, remedy = _reason_of(error)
            self.counts[f"writes_refused_{reason}"] += 1
            self._paused_at = self._now()
            text = "KV is not written to %s for %.0f s (%s); reading goes on. %s"
            self._warn(reason, text, self._directory, PAUSE_S, error, remedy)
        return None

    def _put(self, record: Record, is_needed: bool, counters: UsageCounters) -> bool:
        name = record.name
        for before in self.at(record.start):  # earlier files must not be evicted before this file
            self._touch(before)
        known = self._as_good_as(name)
        if any([self._touch(other) for other in known]) or (self._list(name) and self._touch(name)):
            self.counts["writes_known"] += 1
            return True
        parts = encode(record)
        size = sum(map(len, parts))
        if _counted_bytes(size) > self.bytes_max:
            self.counts["writes_refused_size"] += 1
            return False
        counters.start_day(self._day())
        per_day = self.write_bytes_per_day
        if per_day and counters.bytes_written + size > per_day - (not is_needed) * self.reserve:
            self.counts["writes_refused_budget"] += 1
            return False
        self._write_charged(counters, name, parts, size)
        self.counts["writes"] += 1
        self.counts["bytes_written"] += size
        for other in self._index.alternatives(name):
            counters.bytes_used = _bytes_used(counters) - self._remove(other)
        self._record_change(counters)
        self._listed[name.file_name] = name
        self._index.add(name, _counted_bytes(size))
        return True

    def _write_charged(
        self, counters: UsageCounters, name: FileName, parts: list[memoryview], size: int
    ) -> None:
        """Count a file, then write it: a worker's death in between leaves the counts too high."""
        if _bytes_used(counters) + _counted_bytes(size) > self.bytes_max:
            self._sweep(counters, self.bytes_max - _counted_bytes(size))
        self._charge(counters, size, _counted_bytes(size))
        try:
            self._write_making_room(counters, name, parts, size)
        except OSError:
            self._charge(counters, -size, -_counted_bytes(size))
            raise

    def _charge(self, counters: UsageCounters, size: int, cost: int) -> None:
        counters.bytes_written += size
        counters.bytes_used = _bytes_used(counters) + cost
        counters.save()

    def _write_making_room(
        self, counters: UsageCounters, name: FileName, parts: list[memoryview], size: int
    ) -> None:
        """Write a file. On a full disk, evict twice the file's size and retry.

        After a failed retry, no further file is evicted until a write succeeds.
        """
        try:
            self._write(name, parts)
        except OSError as error:
            if error.errno not in _FULL or self._is_full:
                raise
            self._is_full = True
            self._sweep(counters, _bytes_used(counters) - 2 * _counted_bytes(size))
            self._charge(counters, 0, _counted_bytes(size))  # the sweep did not count this file
            self._write(name, parts)
        self._is_full = False

    def _write(self, name: FileName, parts: list[memoryview]) -> None:
        self._home.mkdir(mode=0o700, exist_ok=True)
        handle, temp = tempfile.mkstemp(prefix=TEMP_PREFIX, dir=self._home)  # 0600
        try:
            try:
                write(handle, parts)
                os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(temp, self._home / name.file_name)
        except OSError:
            with suppress(OSError):  # otherwise the next sweep removes the file
                os.unlink(temp)
            raise

    # ------------------------------------------------------------ sweeping

    def _sweep(self, counters: UsageCounters, goal: int | None = None) -> None:
        """Evict the files of least worth until all roots together take at most `goal` bytes."""
        goal, files = self.bytes_max if goal is None else goal, list(self._stored())
        used = sum(file.nbytes for file in files)
        if used > goal:
            goal = max(0, goal - int(self.bytes_max * SLACK))
            for file in files_to_evict(files, self._now()):
                if used <= goal:
                    break
                if self._unlink(self._directory / file.root / file.name.file_name):
                    used -= file.nbytes
                    self.counts["evictions"] += 1
                    self.counts["bytes_evicted"] += file.nbytes
        assert used >= 0, used
        counters.bytes_used = used
        counters.changes += 1
        counters.save()
        self._seen_at = 0
        self.refresh()

    def _stored(self) -> Iterator[StoredFile]:
        """Yield the files of all roots; remove unfinished files."""
        for home in list(os.scandir(self._directory)):
            if not is_root(home.name) or not home.is_dir(follow_symlinks=False):
                continue
            entries = list(os.scandir(home.path))
            is_read = home.path == str(self._home) or is_of_today(home.name)
            for entry in entries:
                name = parse(entry.name, self.rule)
                if name is not None:
                    status = entry.stat(follow_symlinks=False)
                    size, used_at = _counted_bytes(status.st_size), status.st_mtime
                    yield StoredFile(home.name, name, size, used_at, is_read)
                elif entry.name.startswith(TEMP_PREFIX):
                    self._unlink(Path(entry.path))
                    self.counts["temps_removed"] += 1
            if not entries and home.path != str(self._home):
                with suppress(OSError):  # another worker may just have written into the directory
                    os.rmdir(home.path)

    def _remove(self, name: FileName) -> int:
        """Remove a file of this root; return the file's counted bytes, 0 if the removal failed."""
        size = self._index.discard(name)
        if not self._unlink(self._home / name.file_name):
            return 0
        self._listed.pop(name.file_name, None)
        return size

    def _unlink(self, path: Path) -> bool:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            self.counts["removals_failed"] += 1
            return False
        return True

    def _warn(self, kind: str, text: str, *args: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(text + " Said once; later ones are counted.", *args)

    def _day(self) -> int:
        return int(self._now() // DAY_S)


def _counted_bytes(size: int) -> int:
    """Return as how many bytes a file of `size` bytes counts."""
    return max(size, FILE_BYTES_MIN)


def _bytes_used(counters: UsageCounters) -> int:
    assert counters.bytes_used is not None, "bytes are unknown outside `_under_lock`"
    return counters.bytes_used


def _reason_of(error: OSError) -> tuple[str, str]:
    """Return the word under which an error is counted, and the remedy for the user."""
    if isinstance(error, TimeoutError):
        return "busy", "Another worker may be stopped."
    if error.errno in _FULL:
        return "full", "Free some space, or lower MAX_KV_SIZE_GB."
    if error.errno in _READ_ONLY:
        return "read_only", "Make KV_CACHE_DIR writable, or set another."
    return "failed", "Look at the disk of KV_CACHE_DIR."
