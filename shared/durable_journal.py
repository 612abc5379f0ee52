"""Stores records that outlive their process in a private directory; a writer thread appends them.

A record is a msgpack value in a frame: mark, length, MAC, bytes. Mark and MAC depend on a secret
in the directory, so that neither text of a request nor altered bytes pass for a frame. A damaged
frame is lost alone: reading continues at the next mark.
Records may hold prompts and answers. Directories are therefore 0700, files 0600, and no link is
followed. An API key is never written, only its digest from `Journal.named`.
No caller waits for a disk. Failed writes are counted, with one warning per kind, and all live
records are written again once the disk works.
"""

import fcntl
import hmac
import itertools
import logging
import math
import os
import secrets
import stat
import struct
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from errno import EACCES, EFBIG, EPERM, EROFS, ESTALE, ETIMEDOUT
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import msgpack

from hearth.shared.private_files import make_private

SUFFIX: Final = ".journal"
TEMP_PREFIX: Final = ".writing-"
SECRET_NAME: Final = ".secret"
SECRET_BYTES: Final = 32
RECORD_BYTES_MAX: Final = 1 << 28
FILE_BYTES_MAX: Final = 1 << 31  # size at which appending stops until a rewrite
REWRITE_BYTES_MIN: Final = 1 << 20  # smaller files are not worth a rewrite
STALE_S: Final = 30 * 86_400.0  # directories without a write for this long are removed
NAME_BYTES: Final = 16
OPEN_TRIES_MAX: Final = 8
LOCK_WAIT_S_MAX: Final = 2.0
LOCK_POLL_S: Final = 0.002

_MARK_BYTES: Final = 8
_MAC_BYTES: Final = 16
_HEAD: Final = struct.Struct(f"<{_MARK_BYTES}sI{_MAC_BYTES}s")
_PIECE_BYTES: Final = 1 << 20  # size of one read or write
_READ_ONLY: Final = (EROFS, EACCES, EPERM)
_BIG: Final = 1  # code of integers above 64 bits, which JSON allows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _File:
    """An open file. `is_ours` means that its writer is dead and this process holds the lock."""

    path: Path
    handle: int
    is_ours: bool


class Journal:
    """Reads all journal files of one directory, and appends to one of them.

    A file has one writer, which holds its lock while it lives. A starting process takes over the
    files of dead writers: it appends to the first of them, and removes the others once its own
    file holds their records.
    Owner: the opening thread, later the thread of its `JournalWriter`. Any thread may call `named`
    and read `counts`.
    Invariant: `_own`, if set, is the first of `_files`, and this process holds its lock.
    """

    def __init__(self, directory: Path, schema: int) -> None:
        """Open `directory`, or make it; only records of `schema` are written and read.

        Raises:
            OSError: the directory cannot be made or read.
        """
        self.counts: Counter[str] = Counter()
        self.directory = directory
        self._schema = schema
        self._warned: set[str] = set()
        make_private(directory)
        self._secret = secret_of(directory, secrets.token_bytes(SECRET_BYTES))
        self._mark = blake2b(b"mark", key=self._secret, digest_size=_MARK_BYTES).digest()
        self._files = self._opened()
        self._own: _File | None = next((file for file in self._files if file.is_ours), None)
        self._live_bytes = 0  # size of the own file after its last rewrite
        self._is_damaged = False

    def named(self, text: str) -> str:
        """Return the keyed digest that stands for a secret `text` in this directory."""
        octets = text.encode("utf-8", "surrogatepass")
        return blake2b(octets, key=self._secret, digest_size=NAME_BYTES, person=b"name").hexdigest()

    # ------------------------------------------------------------ reading

    def read(self) -> Iterator[tuple[int, Any]]:
        """Yield (file number, record) of all files, in order within a file. May be called once.

        Damaged records and those of another schema are counted, with one warning per kind.
        """
        for number, file in enumerate(self._files):
            try:
                for end, payload in self._pieces(file):
                    if (record := self._record(file, end, payload)) is not None:
                        yield number, record
            except OSError as error:
                self.count("reads_failed", "%s can't be read on: %s", file.path, error)
            if not file.is_ours:
                os.close(file.handle)
        self._files = [file for file in self._files if file.is_ours]

    def _record(self, file: _File, end: int, payload: bytes | None) -> Any:
        """Return the record in `payload`, or None if it is damaged or of another schema."""
        if payload is None:
            self._is_damaged = True
            text = "a damaged part of %s, up to byte %d, is left out"
            self.count("damaged", text, file.path, end)
            return None
        try:
            schema, record = msgpack.unpackb(payload, ext_hook=_int, unicode_errors="surrogatepass")
            if type(schema) is not int:
                raise TypeError(f"{schema!r} is no schema")
        except (ValueError, TypeError) as error:
            self.count("unreadable", "a record of %s can't be read: %r", file.path, error)
            return None
        if record is None:
            self._live_bytes = end if file is self._own else self._live_bytes
        elif schema != self._schema:
            self.count("other_schema", "a record of %s is of schema %d", file.path, schema)
            return None
        return record

    def _pieces(self, file: _File) -> Iterator[tuple[int, bytes | None]]:
        """Yield (end, payload) of each record; the payload of a damaged part is None."""
        size = os.fstat(file.handle).st_size
        at = 0
        while at < size:
            start = at
            payload = self._payload(file.handle, at, size)
            if payload is None:
                at = self._next(file.handle, at, size)
            else:
                at += _HEAD.size + len(payload)
            assert start < at <= size, (file.path, start, at, size)
            if payload is not None or file.is_ours or at < size:  # else: half written
                yield at, payload

    def _payload(self, handle: int, at: int, size: int) -> bytes | None:
        """Return the payload of the frame at byte `at`, or None if no valid frame begins there."""
        head = os.pread(handle, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        mark, length, mac = _HEAD.unpack(head)
        if mark != self._mark or length > min(RECORD_BYTES_MAX, size - at - _HEAD.size):
            return None
        payload = os.pread(handle, length, at + _HEAD.size)
        return payload if hmac.compare_digest(mac, self._mac(payload)) else None

    def _next(self, handle: int, at: int, size: int) -> int:
        """Return the start of the next valid frame after byte `at`, or `size` if none follows."""
        at += 1
        while at < size:
            window = os.pread(handle, _PIECE_BYTES, at)
            found = window.find(self._mark)
            if found < 0:
                at += max(1, len(window) - _MARK_BYTES + 1)
            elif self._payload(handle, at + found, size) is not None:
                return at + found
            else:
                at += found + 1
        return size

    def _mac(self, payload: bytes) -> bytes:
        return blake2b(payload, key=self._secret, digest_size=_MAC_BYTES).digest()

    # ------------------------------------------------------------ writing

    @property
    def is_rewrite_due(self) -> bool:
        """Return whether one new file of the live records should replace all files."""
        size = os.fstat(self._own.handle).st_size if self._own is not None else 0
        is_long = size > 2 * max(self._live_bytes, REWRITE_BYTES_MIN)
        return is_long or self._is_damaged or len(self._files) > 1

    def packed(self, record: Any) -> bytes:
        """Return a record's frame. Raises: ValueError: the record is unserialisable or too long."""
        value = [self._schema, record]
        payload: bytes = msgpack.packb(value, default=_big, unicode_errors="surrogatepass")
        if len(payload) > RECORD_BYTES_MAX:
            raise ValueError(f"it is {len(payload):,} bytes; the limit is {RECORD_BYTES_MAX:,}")
        return _HEAD.pack(self._mark, len(payload), self._mac(payload)) + payload

    def append(self, frames: Iterable[bytes]) -> None:
        """Append all frames or none; the appended frames are on the disk on return.

        Raises:
            OSError: the disk does not take them.
        """
        data = b"".join(frames)
        if self._own is None:
            self._create(())
        assert self._own is not None
        assert self._own.is_ours, self._own.path
        handle = self._own.handle
        status = os.fstat(handle)
        if not status.st_nlink:
            raise OSError(ESTALE, f"{self._own.path} was removed by somebody")
        if status.st_size + len(data) > FILE_BYTES_MAX:
            raise OSError(EFBIG, f"{self._own.path} has reached {FILE_BYTES_MAX:,} bytes")
        try:
            _write(handle, data)
            os.fsync(handle)
        except OSError:
            with suppress(OSError):  # if this fails, the file has a damaged end
                os.ftruncate(handle, status.st_size)
            raise

    def rewrite(self, frames: Iterable[bytes]) -> None:
        """Replace all files of this process with one new file of `frames`, the live records.

        `frames` may append records to the old file, which stays until the new file is complete.

        Raises:
            OSError: the disk failed; all files are as they were.
        """
        make_private(self.directory)
        if secret_of(self.directory, self._secret) != self._secret:
            raise OSError(ESTALE, f"{self.directory} was made anew by another process")
        whole = self.packed(None)  # marks the end of the rewritten records
        self._create(itertools.chain(frames, [whole]))
        assert self._own is not None
        self._live_bytes = os.fstat(self._own.handle).st_size
        self._is_damaged = False
        others = [file for file in self._files if file is not self._own]
        self._files = [self._own]
        for file in others:
            os.close(file.handle)
            with suppress(FileNotFoundError):
                os.unlink(file.path)

    def _create(self, frames: Iterable[bytes]) -> None:
        """Write `frames` into a new own file, and close the file that it replaces."""
        old = self._own
        path = self.directory / f"{secrets.token_hex(8)}{SUFFIX}" if old is None else old.path
        handle, temp = tempfile.mkstemp(prefix=TEMP_PREFIX, dir=self.directory)  # 0600
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.fcntl(handle, fcntl.F_SETFL, os.O_APPEND)
            for frame in frames:
                _write(handle, frame)
            os.fsync(handle)
            os.replace(temp, path)
        except BaseException:
            os.close(handle)
            with suppress(OSError):  # the next start removes it
                os.unlink(temp)
            raise
        self._own = _File(path, handle, is_ours=True)
        self._files = [self._own, *(file for file in self._files if file is not old)]
        if old is not None:
            os.close(old.handle)

    def close(self) -> None:
        """Close all files, which releases their locks."""
        for file in self._files:
            os.close(file.handle)
        self._files, self._own = [], None

    # ------------------------------------------------------------ opening

    def _opened(self) -> list[_File]:
        """Open all journals, those of dead writers first; remove dead writers' unfinished files.

        If a file vanishes meanwhile, another process took it over, and the directory is read again.
        """
        for _ in range(OPEN_TRIES_MAX):
            files: list[_File] = []
            try:
                for name in sorted(os.listdir(self.directory)):
                    if name.endswith(SUFFIX) or name.startswith(TEMP_PREFIX):
                        files += self._open(self.directory / name)
            except FileNotFoundError:
                for file in files:
                    os.close(file.handle)
                continue
            return sorted(files, key=lambda file: not file.is_ours)
        raise OSError(ESTALE, f"{self.directory} does not come to rest")

    def _open(self, path: Path) -> Iterator[_File]:
        """Yield the open file at `path`, or nothing if it is no journal."""
        try:
            handle = _handle(path)
        except FileNotFoundError:
            raise
        except OSError as error:  # a link, or another user's file
            self.count("opens_failed", "%s is left alone: %s", path, error)
            return
        is_ours = _locked(handle)
        if path.name.endswith(SUFFIX) and stat.S_ISREG(os.fstat(handle).st_mode):
            yield _File(path, handle, is_ours)
            return
        os.close(handle)
        if path.name.startswith(TEMP_PREFIX) and is_ours:
            with suppress(OSError):  # the next start tries again
                os.unlink(path)

    def count(self, kind: str, text: str, *args: object, number: int = 1) -> None:
        """Count a failure of this kind, and log a warning for the first one."""
        self.counts[kind] += number
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(text + ". Said once; later ones are counted.", *args)


def remove_stale(directory: Path, prefix: str, now: float) -> None:
    """Remove the journals beside `directory` that begin with `prefix` and are older than STALE_S.

    They belong to models that are no longer served. Raises: OSError.
    """
    for home in directory.parent.glob(f"{prefix}*"):
        if home == directory or home.is_symlink() or not home.is_dir():
            continue
        files = [
            path
            for path in home.iterdir()
            if path.name == SECRET_NAME
            or path.name.endswith(SUFFIX)
            or path.name.startswith(TEMP_PREFIX)
        ]
        if any(now - path.lstat().st_mtime < STALE_S for path in (home, *files)):
            continue
        for path in files:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # a directory with other files stays
            home.rmdir()


def secret_of(directory: Path, new: bytes) -> bytes:
    """Return the secret of `directory`; if none is stored, store `new`. Raises: OSError."""
    handle = _handle(directory / SECRET_NAME, os.O_CREAT)
    try:
        deadline = time.monotonic() + LOCK_WAIT_S_MAX
        while not _locked(handle):  # another process is storing the secret
            if time.monotonic() > deadline:
                raise OSError(ETIMEDOUT, f"{directory / SECRET_NAME} stays locked")
            time.sleep(LOCK_POLL_S)
        found = os.pread(handle, SECRET_BYTES, 0)
        if len(found) == SECRET_BYTES:
            return found
        os.ftruncate(handle, 0)  # a process died before it had stored the secret
        _write(handle, new)
        os.fsync(handle)
        return new
    finally:
        os.close(handle)


def _handle(path: Path, more: int = 0) -> int:
    """Open a file to read and append, or only to read if it is read-only. Raises: OSError."""
    flags = os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, os.O_RDWR | flags | more, mode=0o600)
    except OSError as error:
        if error.errno not in _READ_ONLY:
            raise
    return os.open(path, os.O_RDONLY | flags)


def _locked(handle: int) -> bool:
    """Lock a file until its handle is closed; return False if another process has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(handle: int, data: bytes) -> None:
    """Write all of `data`. Raises: OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view[:_PIECE_BYTES]) :]


def _big(value: Any) -> Any:
    """Return an integer of more than 64 bits as a msgpack extension."""
    if type(value) is not int:
        raise TypeError(f"{type(value).__name__} has no place in a record")
    return msgpack.ExtType(_BIG, hex(value).encode())


def _int(code: int, octets: bytes) -> int:
    if code != _BIG:
        raise ValueError(f"{code} is no type of ours")
    return int(octets, 16)


QUEUE_BYTES_MAX: Final = 64 * 1024 * 1024
QUEUE_ITEMS_MAX: Final = 10_000
RETRY_S: Final = 60.0  # between two attempts to rewrite
CLOSE_WAIT_S_MAX: Final = 2.0

T = TypeVar("T")


class JournalSource(Protocol[T]):
    """Gives a journal writer its records. All methods are called on the writer's thread."""

    def everything(self) -> Iterable[T]:
        """Return all live items, oldest first. Items put meanwhile may or may not be included."""
        ...

    def record(self, item: T) -> Any:
        """Return the record to be written for an item."""
        ...

    def lost(self) -> None:
        """Forget the records returned so far: they may be missing in the file."""
        ...


class NullJournalWriter:
    """Writes nothing: the caller's memory ends with the process."""

    def named(self, text: str) -> str:
        return text

    def read(self) -> Iterator[tuple[int, Any]]:
        return iter(())

    def put(self, item: object, nbytes: int, renews: bool = False) -> None: ...

    def flush(self, seconds: float) -> bool:
        return True

    def close(self) -> None: ...

    def report(self) -> dict[str, int]:
        return {}


class JournalWriter(Generic[T]):
    """Writes a journal in a thread of its own, which alone uses the journal after the first `put`.

    The maker calls `read` before any `put`. Any thread may call every other method; only `flush`
    and `close` block.
    Invariant: `_queue_bytes` is the sum over `_queue`, at most QUEUE_BYTES_MAX.
    """

    def __init__(self, journal: Journal, source: JournalSource[T]) -> None:
        self._journal = journal
        self._source = source
        # Kept for a moment: records that wait for the disk
        self._queue: deque[tuple[T, int]] = deque()
        self._queue_bytes = 0
        self._is_open = True
        self._is_busy = False
        self._is_behind = False  # a live record may be missing in the files
        self._rewritten_at = -math.inf  # time of the last attempt
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def named(self, text: str) -> str:
        """Return the keyed digest that stands for a secret `text` in this journal."""
        return self._journal.named(text)

    def read(self) -> Iterator[tuple[int, Any]]:
        """Yield (file number, record) of all earlier records. Call it once, before `put`."""
        return self._journal.read()

    def put(self, item: T, nbytes: int, renews: bool = False) -> None:
        """Queue `item`, of about `nbytes`, or drop it if the queue has no room.

        `renews` says that the item revokes earlier records, which a rewrite has to remove.
        """
        assert nbytes >= 0, nbytes
        with self._changed:
            self._is_behind |= renews
            is_full = len(self._queue) >= QUEUE_ITEMS_MAX
            if not self._is_open or is_full or self._queue_bytes + nbytes > QUEUE_BYTES_MAX:
                self._journal.counts["dropped"] += 1
                self._is_behind = True
                return
            self._queue.append((item, nbytes))
            self._queue_bytes += nbytes
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Wait at most `seconds` until the queue is written; return whether it was written."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._is_busy), seconds)

    def close(self) -> None:
        """Write the queue and end, within CLOSE_WAIT_S_MAX. May be called once."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._thread.join(CLOSE_WAIT_S_MAX)

    def report(self) -> dict[str, int]:
        """Return the counters."""
        return dict(self._journal.counts)

    # ------------------------------------------------------------ the writer's thread

    def _run(self) -> None:
        while self._wait():
            try:
                self._append()
                if self._is_open and (self._journal.is_rewrite_due or self._is_behind):
                    self._rewrite()
            except Exception:  # a bug here must not end any request
                self._journal.counts["failed"] += 1
                self._is_behind = True
                log.exception("the journal's thread failed")
        self._journal.close()

    def _wait(self) -> bool:
        """Wait until the queue has items or is closed; return whether it has items."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or not self._is_open)
            self._is_busy = bool(self._queue)
            return self._is_busy

    def _append(self) -> list[bytes]:
        """Write the queue; return its frames."""
        assert threading.current_thread() is self._thread, threading.current_thread()
        with self._changed:
            items = [item for item, _ in self._queue]
            self._queue.clear()
            self._queue_bytes = 0
        frames = list(self._frames(items))
        try:
            self._journal.append(frames)
            self._journal.counts["written"] += len(frames)
        except OSError as error:
            self._count("not_written", error, len(frames))
            self._source.lost()
            self._is_behind = True
        return frames

    def _frames(self, items: Iterable[T]) -> Iterator[bytes]:
        for item in items:
            try:
                yield self._journal.packed(self._source.record(item))
            except (ValueError, TypeError, OverflowError) as error:  # such as JSON nested too deep
                self._source.lost()
                self._count("unwritable", error)

    def _rewrite(self) -> None:
        if time.monotonic() - self._rewritten_at < RETRY_S:
            return
        self._rewritten_at = time.monotonic()
        self._is_behind = False
        try:
            self._journal.rewrite(self._all())
            self._journal.counts["rewritten"] += 1
        except OSError as error:
            self._is_behind = True
            self._count("not_rewritten", error)
        finally:
            self._source.lost()

    def _all(self) -> Iterator[bytes]:
        """Yield the frames of all live items; items put meanwhile also go to the old file."""
        later: list[bytes] = []
        self._source.lost()
        for frame in self._frames(self._source.everything()):
            yield frame
            if self._queue:
                later += self._append()
        yield from later

    def _count(self, kind: str, error: Exception, number: int = 1) -> None:
        text, directory = "what is to outlive a restart is %s in %s: %s", self._journal.directory
        self._journal.count(kind, text, kind.replace("_", " "), directory, error, number=number)


def open_journal_writer(
    directory: Path | None, source: JournalSource[T], schema: int
) -> "JournalWriter[T] | NullJournalWriter":
    """Return the writer of `directory`.

    It is a NullJournalWriter if `directory` is None or, with a warning, if it is unusable.
    """
    if directory is None:
        return NullJournalWriter()
    try:
        journal = Journal(directory, schema)
    except OSError as error:
        log.warning("nothing is remembered across restarts: %s", error)
        return NullJournalWriter()
    try:
        remove_stale(directory, directory.name.partition("-")[0] + "-", time.time())
    except OSError as error:  # the next start tries again
        log.warning("what other models left stays: %s", error)
    return JournalWriter(journal, source)
