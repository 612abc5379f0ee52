"""Reads and writes KV files in a thread of its own. Reads go before writes."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from hearth.worker.disk.file_format import FileName, Record
from hearth.worker.disk.file_store import FileStore

QUEUE_BYTES_MIN: Final = 1 << 28  # least room for arrays that wait to be written
READS_MAX: Final = 1_000  # most reads that wait at once
REFRESH_S: Final = 2.0  # time between listings of the directory, which find other workers' files
CLOSE_WAIT_S_MAX: Final = 2.0
UNLIMITED: Final = 1 << 62

Records = list[Record | None]
OnRead = Callable[[Records], None]

log = logging.getLogger(__name__)


class DiskThread:
    """The I/O thread, which alone reads, writes and sweeps `file_store`; reads go before writes.

    Every accepted read is answered exactly once, with None for each record that could not be read;
    after `close`, with None for every record. An error of the disk, the file store or a caller ends
    only the job at hand: the thread counts the error and continues.
    The arrays of records must be evaluated and never change again.
    Invariant: at most `queue_bytes_max` bytes and READS_MAX reads wait.
    Any thread may call any method; only `flush` and `close` block.
    """

    def __init__(self, file_store: FileStore, queue_bytes_max: int = QUEUE_BYTES_MIN) -> None:
        self.counts: Counter[str] = Counter()
        self.file_store = file_store
        self.queue_bytes_max = queue_bytes_max
        # Kept for a moment: work that waits for the disk
        self._reads: deque[tuple[Sequence[FileName], OnRead]] = deque()
        self._writes: deque[tuple[Record, bool]] = deque()
        self._queue_bytes = 0  # bytes of `_writes` and of the record in progress
        self._is_open = True
        self._refresh_waiters: list[threading.Event] = []  # set after a listing
        self._refreshed_at = time.monotonic()
        # Kept for a moment: work that waits for the disk
        self._discards: deque[FileName] = deque()  # files to remove before all other work
        self._drops: set[FileName] = set()  # files to remove once no write waits
        self._clears = False  # whether to empty the file store before reads and writes
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self.thread.start()

    def lift_limit(self) -> None:
        """Accept every write from now on. For shutdown, when no further requests come."""
        self.queue_bytes_max = UNLIMITED

    def accepts(self, nbytes: int) -> bool:
        """Whether `write` would accept a record of `nbytes` now; False counts as a refused write.

        Callers check this before copying rows, so that no rows are copied in vain.
        """
        with self._changed:
            fits = self._queue_bytes + nbytes <= self.queue_bytes_max
            self.counts["writes_refused_queue"] += not (fits and self._is_open)
            return fits and self._is_open

    def write(self, record: Record, is_needed: bool = False) -> bool:
        """Queue a record to be written; return False if the queue has no room for the record.

        `is_needed` is passed to `FileStore.put`.
        """
        with self._changed:
            fits = self._queue_bytes + record.nbytes <= self.queue_bytes_max
            if not (fits and self._is_open):
                self.counts["writes_refused_queue"] += 1
                return False
            self._drops.discard(record.name)
            self._writes.append((record, is_needed))
            self._queue_bytes += record.nbytes
            assert 0 < self._queue_bytes <= self.queue_bytes_max, self._queue_bytes
            self._changed.notify_all()
            return True

    def read(self, names: Sequence[FileName], on_read: OnRead) -> bool:
        """Queue a read. `on_read(records)` runs on the I/O thread, with a record or None per name.

        After `close`, or while READS_MAX reads wait, return False and never call `on_read`.
        """
        with self._changed:
            if not self._is_open or len(self._reads) >= READS_MAX:
                self.counts["reads_refused_queue"] += 1
                return False
            self._reads.append((names, on_read))
            assert len(self._reads) <= READS_MAX, len(self._reads)
            self._changed.notify_all()
            return True

    def refresh(self) -> threading.Event | None:
        """List the directory before all other work; the returned event is set afterwards.

        None if no other worker has written to the directory: a listing would find nothing new.
        """
        with self._changed:
            if not (self._is_open and self.file_store.is_shared):
                return None
            refreshed = threading.Event()
            self._refresh_waiters.append(refreshed)
            self._changed.notify_all()
            return refreshed

    def discard(self, name: FileName) -> None:
        """Remove an undamaged file that this worker cannot use. Lookups no longer find the file."""
        self.file_store.hide(name)
        with self._changed:
            self._discards.append(name)
            self._changed.notify_all()

    def holds(self, name: FileName) -> bool:
        """Whether a record is on disk and is not about to be removed."""
        return name not in self._drops and self.file_store.holds(name)

    def drop(self, names: Iterable[FileName]) -> None:
        """Remove files once all queued records, with the files' replacements, are written."""
        with self._changed:
            self._drops.update(names)
            self._changed.notify_all()

    def clear(self) -> None:
        """Empty the file store. Waiting writes are dropped, and lookups find no old file."""
        with self._changed:
            self.file_store.hide_all()
            self._queue_bytes -= sum(record.nbytes for record, _ in self._writes)
            assert self._queue_bytes >= 0, self._queue_bytes
            self._writes.clear()
            self._clears = True
            self._changed.notify_all()

    @property
    def has_lost(self) -> bool:
        """Whether the file store has ever refused a record that `write` had accepted."""
        return self.counts["writes_lost"] > 0

    @property
    def is_drained(self) -> bool:
        """Whether no accepted record waits to be written."""
        return not self.queue_bytes

    @property
    def queue_bytes(self) -> int:
        """The bytes that wait to be written or are being written."""
        with self._changed:
            return self._queue_bytes

    def flush(self, seconds: float) -> bool:
        """Wait at most `seconds` for all queued records to be written; return whether all are."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._queue_bytes:
                left = deadline - time.monotonic()
                if left <= 0 or not self._is_open:
                    return False
                self._changed.wait(left)
        return True

    def close(self) -> None:
        """End the thread within CLOSE_WAIT_S_MAX. Queued records are dropped and counted."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self.thread.join(CLOSE_WAIT_S_MAX)

    def report(self) -> dict[str, Any]:
        """Return the figures of the file store and of the queue for `/v1/cache`."""
        with self._changed:
            counts, queued = dict(self.counts), self._queue_bytes
        assert queued >= 0, queued
        figures = self.file_store.report()
        return {**figures, "queue_bytes": queued, "counts": figures["counts"] | counts}

    # ------------------------------------------------------------ the I/O thread

    def _run(self) -> None:
        self._guarded(self.file_store.sweep)
        while self._step():
            pass

    def _step(self) -> bool:
        """Do one job, after a listing of the directory if one is due; return False once closed."""
        with self._changed:
            waiting = (self._reads, self._writes, self._clears, self._discards, self._drops)
            if not any((*waiting, self._refresh_waiters)) and self._is_open:
                self._changed.wait(REFRESH_S)
            is_open = self._is_open
            if not is_open and self._writes:
                self.counts["writes_dropped"] += len(self._writes)
                self._writes.clear()
            waiters, self._refresh_waiters = self._refresh_waiters, []
            clears, self._clears = self._clears, False
            discards, self._discards = self._discards, deque()
            read = self._reads.popleft() if self._reads and not clears else None
            is_writing = bool(self._writes) and not clears and read is None
            write = self._writes.popleft() if is_writing else None
            is_busy = write is not None and bool(self._writes)
            drops, self._drops = (set(), self._drops) if is_busy else (self._drops, set())
        self._refresh_if_due(waiters)
        for name in discards:
            self._guarded(partial(self.file_store.remove, name))
        if clears:
            self._guarded(self.file_store.clear)
        elif read is not None:
            self._read(*read, is_open)
        elif write is not None:
            self._write(*write)
        elif not is_open:
            return False
        if drops:
            self._guarded(partial(self.file_store.drop, drops))
        return True

    def _refresh_if_due(self, waiters: Sequence[threading.Event]) -> None:
        """List the directory every REFRESH_S, and at once if a caller waits for a listing."""
        if waiters or time.monotonic() - self._refreshed_at >= REFRESH_S:
            self._guarded(self.file_store.refresh)
            self._refreshed_at = time.monotonic()
        for refreshed in waiters:
            refreshed.set()

    def _read(self, names: Sequence[FileName], on_read: OnRead, is_open: bool) -> None:
        records: Records = [None] * len(names)

        def fetch() -> None:
            for number, name in enumerate(names):
                records[number] = self.file_store.get(name)

        if is_open:
            self._guarded(fetch)
        self._guarded(lambda: on_read(records))

    def _write(self, record: Record, is_needed: bool) -> None:
        is_kept = self._guarded(partial(self.file_store.put, record, is_needed))
        with self._changed:
            self.counts["writes_lost"] += not is_kept
            self._queue_bytes -= record.nbytes
            self._changed.notify_all()

    def _guarded(self, job: Callable[[], object]) -> object:
        """Run a job and return its result; count an error and return None."""
        try:
            return job()
        except Exception:
            with self._changed:
                self.counts["jobs_failed"] += 1
            log.exception("a job of the KV disk thread failed")
        return None
