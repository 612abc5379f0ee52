"""Writes the cache trace: one JSON line per request, in one file per day and session.

This module names, opens, bounds and removes files. The session manager decides what a line holds.
"""

import json
import logging
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from hearth.shared.private_files import make_private

FILE_BYTES_MAX: Final = 4 * 1024 * 1024  # a larger file is rotated; one rotated file is kept
FILES_MAX: Final = 1_000  # most files of one day, `_OTHER_FILE` included, rotated files excluded
DAYS_MAX: Final = 14
RECORDS_WAITING_MAX: Final = 10_000  # most queued records; if the disk hangs, later ones are lost
CLOSE_WAIT_S_MAX: Final = 5.0

_PLAIN: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DAY: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_TRACE_FILE: Final = re.compile(r"cache-session-[A-Za-z0-9._-]{1,64}\.log(\.1)?")
_OTHER_FILE: Final = "cache-session-other.log"  # for sessions beyond FILES_MAX

TraceRecord = dict[str, Any]

log = logging.getLogger(__name__)


class TraceLog:
    """Appends records to `<root>/<day>/cache-session-<name>.log`, directories 0700, files 0600.

    Any thread may write records. A daemon thread does all disk work and owns the files. If the disk
    fails, records are lost and counted in `lost`, and one warning is logged. Several workers may
    share `root`.
    Invariant: a record is one write in append mode, and no file is longer than FILE_BYTES_MAX.
    """

    def __init__(self, root: Path, is_on: bool, today: Callable[[], date] = date.today) -> None:
        self.lost = 0  # records that were not written
        self._is_on = is_on
        self._root = root
        self._today = today
        self._day = ""
        # Kept for nobody: names of the traces' files
        self._names: set[str] = set()  # names of today's files
        self._has_warned = False
        self._queue: SimpleQueue[tuple[str, TraceRecord] | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._run, name="trace-log", daemon=True)
        if is_on:
            self._writer.start()

    def write(self, session: str, record: TraceRecord) -> None:
        """Queue `record`, which must not change afterwards. For any thread; never blocks."""
        if not self._is_on:
            return
        if self._queue.qsize() >= RECORDS_WAITING_MAX:
            self._count("its writer is behind")
        else:
            self._queue.put((session, record))

    def close(self) -> None:
        """Write queued records within CLOSE_WAIT_S_MAX; ignore later records. For any thread."""
        if self._is_on:
            self._is_on = False
            self._queue.put(None)
            self._writer.join(CLOSE_WAIT_S_MAX)

    def _count(self, reason: str) -> None:
        self.lost += 1
        if not self._has_warned:
            self._has_warned = True
            log.warning("cache trace: a row is lost, and later ones may be: %s", reason)

    # ------------------------------------------------------------ the log's thread

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            session, record = entry
            # JSON escapes keep the record on one ASCII line, whatever the client's name holds.
            line = json.dumps(record, default=str, separators=(",", ":")).encode() + b"\n"
            try:
                self._append(self._today().isoformat(), session, line)
            except OSError as error:
                self._count(str(error))

    def _append(self, day: str, session: str, line: bytes) -> None:
        """Write `line` at the end of the session's file of `day`.

        Raises:
            OSError: the disk refuses the write, or the line is over FILE_BYTES_MAX.
        """
        if len(line) > FILE_BYTES_MAX:
            raise OSError(f"it is {len(line):,} bytes; the limit is {FILE_BYTES_MAX:,}")
        assert line.endswith(b"\n"), line[-20:]
        directory = self._root / day
        if day != self._day or not directory.is_dir():
            make_private(directory)
            self._day, self._names = day, set()
            try:
                _remove_old_days(self._root, day)
            except OSError as error:  # the next day's directory is tried again
                log.warning("cache trace: old days stay: %s", error)
        path = directory / self._name_in(directory, session)
        with suppress(FileNotFoundError):
            if path.stat().st_size + len(line) > FILE_BYTES_MAX:
                path.replace(path.with_name(path.name + ".1"))
        append_line(path, line)
        self._names.add(path.name)

    def _name_in(self, directory: Path, session: str) -> str:
        name = f"cache-session-{name_of_session(session)}.log"
        if name in self._names or (directory / name).exists():
            return name
        count = sum(name.endswith(".log") for name in os.listdir(directory))
        return name if count < FILES_MAX - 1 else _OTHER_FILE


def name_of_session(session: str) -> str:
    """Return the session's id if the id is a plain file name, else a digest of the id."""
    if not session:
        return "anonymous"
    if _PLAIN.fullmatch(session):
        return session
    return blake2b(session.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def append_line(path: Path, line: bytes) -> None:
    """Write `line` at the end of `path`. A new file is private to its owner; links are refused.

    A fifo without a reader is an error, not a wait.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, mode=0o600)
    try:
        written = os.write(handle, line)
    finally:
        os.close(handle)
    if written != len(line):
        raise OSError(f"{path}: the disk took {written} of {len(line)} bytes")


def _remove_old_days(root: Path, day: str) -> None:
    """Remove the trace files of all days up to `day` except the newest DAYS_MAX days.

    Other files stay.

    Raises:
        OSError: the disk refuses to remove a file.
    """
    days = [
        path
        for path in root.iterdir()
        if _DAY.fullmatch(path.name)
        and path.name <= day
        and path.is_dir()
        and not path.is_symlink()
    ]
    for directory in sorted(days)[:-DAYS_MAX]:
        for path in directory.iterdir():
            if _TRACE_FILE.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                path.unlink(missing_ok=True)  # another worker may remove the same file
        with suppress(OSError):  # a directory with other files stays
            directory.rmdir()
