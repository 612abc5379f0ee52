"""Holds the lock of a KV directory, and the counters of bytes that all its workers share."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hearth.shared.private_files import make_private, read_small_file
from hearth.shared.suspending_clock import awake_s

FILE_NAME: Final = ".ledger"
FILE_BYTES: Final = 256  # of the file: always the same ones, so that a full disk still takes them
POLL_S: Final = 0.002
_INTEGER_MAX: Final = 1 << 62


@dataclass(slots=True)
class UsageCounters:
    """The file's content, while its lock is held. `save` makes changes last.

    Invariant: `bytes_used` may exceed what is there (a file that somebody removed by hand), never
    fall short of what workers have put there; a sweep sets it right.
    """

    day: int = 0  # since the epoch, UTC
    bytes_written: int = 0  # on that day
    bytes_used: int | None = None  # None = not known: count the files
    changes: int = 0  # times that files came or went, so that nobody lists them without need
    handle: int = -1
    was_damaged: bool = False

    def turn_to(self, day: int) -> None:
        """Begin the count of another day, also where the clock was put back."""
        if day != self.day:
            self.day, self.bytes_written = day, 0

    def save(self) -> None:
        assert self.handle >= 0, "counters are saved only under their lock"
        fields = {k: v for k, v in asdict(self).items() if k not in ("handle", "was_damaged")}
        text = json.dumps(fields).encode().ljust(FILE_BYTES - 1) + b"\n"
        assert len(text) == FILE_BYTES, len(text)
        os.pwrite(self.handle, text, 0)


@contextmanager
def locked_counters(directory: Path, wait_s: float) -> Iterator[UsageCounters]:
    """Hold the directory's lock; yield its counters. The system frees it when a process dies.

    Raises:
        TimeoutError: another worker has held it for `wait_s`.
        OSError: the directory can't be written.
    """
    make_private(directory)
    handle = os.open(directory / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        _lock(handle, wait_s)
        counters = _parse(os.pread(handle, FILE_BYTES, 0))
        counters.handle = handle
        try:
            yield counters
        finally:
            counters.handle = -1
    finally:
        os.close(handle)


def read_counters(directory: Path) -> UsageCounters | None:
    """Return the counters as they are now, without the lock; None where they are not known."""
    try:
        text = read_small_file(directory / FILE_NAME, FILE_BYTES)
    except OSError:
        return None
    counters = _parse(text)
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


def _parse(text: bytes) -> UsageCounters:
    if not text:
        return UsageCounters()  # a new file
    try:
        fields: Any = json.loads(text)
        used = fields["bytes_used"]
        counters = UsageCounters(
            _count(fields["day"]),
            _count(fields["bytes_written"]),
            None if used is None else _count(used),
            _count(fields.get("changes", 0)),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return UsageCounters(was_damaged=True)
    return counters


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _INTEGER_MAX:
        raise ValueError(f"{value!r} is no count")
    return value
