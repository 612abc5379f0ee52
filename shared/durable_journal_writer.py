"""Keeps a journal: takes what is to be remembered from any thread, and writes it on one of its own.

No caller waits for a disk. A disk that fails costs what could not be written: that is counted, with
one warning a kind, and all that is alive is written anew once the disk takes it again.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from hearth.shared.durable_journal import Journal, remove_stale

QUEUE_BYTES_MAX: Final = 64 * 1024 * 1024
QUEUE_ITEMS_MAX: Final = 10_000
RETRY_S: Final = 60.0  # between two attempts to write all anew
CLOSE_WAIT_S_MAX: Final = 2.0

T = TypeVar("T")

log = logging.getLogger(__name__)


class JournalSource(Protocol[T]):
    """Gives a journal writer its records. Its methods are called on the writer's thread."""

    def everything(self) -> Iterable[T]:
        """Return all that is alive now, oldest first. What is put meanwhile may be in it or not."""
        ...

    def record(self, item: T) -> Any:
        """Return what is to be written of an item."""
        ...

    def lost(self) -> None:
        """What `record` returned before may not be in the file: nothing may refer to it."""
        ...


class NullJournalWriter:
    """Writes nothing: what is remembered ends with the process."""

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
    """The thread that writes a journal, which it alone uses once something was put.

    First whoever makes it reads, then anyone may put. Any thread may call any other method; none
    but `flush` and `close` blocks.
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
        self._is_behind = False  # something that is alive may not be in the files
        self._rewritten_at = -math.inf  # or tried to
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def named(self, text: str) -> str:
        """Return what `text`, which may be secret, is known by in this journal alone."""
        return self._journal.named(text)

    def read(self) -> Iterator[tuple[int, Any]]:
        """Yield (number of its file, record) of all that was written before. Once, and first."""
        return self._journal.read()

    def put(self, item: T, nbytes: int, renews: bool = False) -> None:
        """Have `item`, about `nbytes` large, written; what does not fit the queue is dropped.

        `renews`: it takes something back, and what the files hold of that has to go.
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
        """Wait at most `seconds` until all that was put is written; say whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._queue or self._is_busy), seconds)

    def close(self) -> None:
        """Write what waits, and end within CLOSE_WAIT_S_MAX. Once."""
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
                if self._is_open and (self._journal.is_due or self._is_behind):
                    self._rewrite()
            except Exception:  # a bug costs what it was about, and no request
                self._journal.counts["failed"] += 1
                self._is_behind = True
                log.exception("the journal's thread failed")
        self._journal.close()

    def _wait(self) -> bool:
        """Wait for something to do; say whether there is."""
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._queue or not self._is_open)
            self._is_busy = bool(self._queue)
            return self._is_busy

    def _append(self) -> list[bytes]:
        """Write what waits; return its frames."""
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
            except (ValueError, TypeError, OverflowError) as error:  # as JSON nested too deep
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
        """Yield all that is alive; what is put meanwhile is written to the old file at once too."""
        later: list[bytes] = []
        self._source.lost()
        for frame in self._frames(self._source.everything()):
            yield frame
            if self._queue:
                later += self._append()
        yield from later

    def _count(self, kind: str, error: Exception, number: int = 1) -> None:
        text, place = "what is to outlive a restart is %s in %s: %s", self._journal.directory
        self._journal.count(kind, text, kind.replace("_", " "), place, error, number=number)


def open_journal_writer(
    directory: Path | None, source: JournalSource[T], schema: int
) -> "JournalWriter[T] | NullJournalWriter":
    """Return the writer of `directory`.

    One that writes nothing for None, and, with a warning, where the directory can't be used.
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
