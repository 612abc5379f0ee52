"""Reads and writes KV files in a thread of its own, reads before writes."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from hearth.worker.disk.file_format import FileName, Record
from hearth.worker.disk.file_store import FileStore

QUEUE_BYTES_MIN: Final = 1 << 28  # of arrays that may wait to be written, and so not be freed
READS_MAX: Final = 1_000  # that wait
REFRESH_S: Final = 2.0  # what other workers write is found this late, unless somebody asks
CLOSE_WAIT_S_MAX: Final = 2.0
UNLIMITED: Final = 1 << 62

Records = list[Record | None]
OnRead = Callable[[Records], None]

log = logging.getLogger(__name__)


class DiskThread:
    """The I/O thread. It alone reads, writes and sweeps `file_store`; reads go before writes.

    Every read that is taken is answered once, with None for what could not be had; after `close`
    with nothing else. An error of the disk, the file store or a caller ends its job only: it is
    counted, and the thread goes on.
    Records must be evaluated arrays that nobody writes: they leave this module unchanged.
    Invariant: at most `queue_bytes_max` wait to be written, and READS_MAX reads.
    Any thread may call any method; none but `flush` and `close` blocks.
    """

    def __init__(self, file_store: FileStore, queue_bytes_max: int = QUEUE_BYTES_MIN) -> None:
        self.counts: Counter[str] = Counter()
        self.file_store = file_store
        self.queue_bytes_max = queue_bytes_max
        # Kept for a moment: work that waits for the disk
        self._reads: deque[tuple[Sequence[FileName], OnRead]] = deque()
        self._writes: deque[tuple[Record, bool]] = deque()
        self._queue_bytes = 0  # of `_writes`, and of the one that is being written
        self._is_open = True
        self._looks: list[threading.Event] = []  # of whoever waits for a look at the directory
        self._looked_at = time.monotonic()
        # Kept for a moment: work that waits for the disk
        self._discards: deque[FileName] = deque()  # files to remove, before anything else is done
        self._drops: set[FileName] = set()  # files to remove once nothing waits to be written
        self._clears = False  # the file store is to be emptied before anything else
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self.thread.start()

    def lift_bound(self) -> None:
        """Take all that is written from now on: at the end, when no more comes up."""
        self.queue_bytes_max = UNLIMITED

    def takes(self, nbytes: int) -> bool:
        """Whether a record of so many bytes would be taken now; where not, that counts as refused.

        Who asks before it copies need not copy what is refused.
        """
        with self._changed:
            fits = self._queue_bytes + nbytes <= self.queue_bytes_max
            self.counts["writes_refused_queue"] += not (fits and self._is_open)
            return fits and self._is_open

    def write(self, record: Record, is_needed: bool = False) -> bool:
        """Have a record written; say whether it was taken. What does not fit is refused.

        `is_needed` as in `FileStore.put`.
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

    def read(self, names: Sequence[FileName], then: OnRead) -> bool:
        """Have `then(records)` called on the I/O thread, one record or None for each name.

        Say whether it will be: not once closed, nor while READS_MAX wait.
        """
        with self._changed:
            if not self._is_open or len(self._reads) >= READS_MAX:
                self.counts["reads_refused_queue"] += 1
                return False
            self._reads.append((names, then))
            assert len(self._reads) <= READS_MAX, len(self._reads)
            self._changed.notify_all()
            return True

    def look(self) -> threading.Event | None:
        """Have the directory looked at before anything else is done; the event says that it was.

        None where no other worker has written there: there is nothing to find.
        """
        with self._changed:
            if not (self._is_open and self.file_store.is_shared):
                return None
            seen = threading.Event()
            self._looks.append(seen)
            self._changed.notify_all()
            return seen

    def discard(self, name: FileName) -> None:
        """Have a file removed that is whole and cannot be used; it is not found any more."""
        self.file_store.hide(name)
        with self._changed:
            self._discards.append(name)
            self._changed.notify_all()

    def holds(self, name: FileName) -> bool:
        """Whether a record is on disk and stays there."""
        return name not in self._drops and self.file_store.holds(name)

    def drop(self, names: Iterable[FileName]) -> None:
        """Have files removed once all that is queued now is written: what replaces them."""
        with self._changed:
            self._drops.update(names)
            self._changed.notify_all()

    def clear(self) -> None:
        """Have the file store emptied; writes that wait are dropped, and nothing is found now."""
        with self._changed:
            self.file_store.hide_all()
            self._queue_bytes -= sum(record.nbytes for record, _ in self._writes)
            assert self._queue_bytes >= 0, self._queue_bytes
            self._writes.clear()
            self._clears = True
            self._changed.notify_all()

    @property
    def has_lost(self) -> bool:
        """Whether the file store has ever refused what was taken here."""
        return self.counts["writes_lost"] > 0

    @property
    def is_drained(self) -> bool:
        """Whether nothing that was taken waits to be written."""
        return not self.queue_bytes

    @property
    def queue_bytes(self) -> int:
        """How much waits to be written, with what is being written."""
        with self._changed:
            return self._queue_bytes

    def flush(self, seconds: float) -> bool:
        """Wait at most `seconds` until all that is queued is put; say whether it is."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._queue_bytes:
                left = deadline - time.monotonic()
                if left <= 0 or not self._is_open:
                    return False
                self._changed.wait(left)
        return True

    def close(self) -> None:
        """End the thread within CLOSE_WAIT_S_MAX; what is queued is dropped, and counted."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self.thread.join(CLOSE_WAIT_S_MAX)

    def report(self) -> dict[str, Any]:
        """Return the file store's figures for `/v1/cache`, and those of the queue."""
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
        """Do one job, after a look at the directory where one is due; False at the end."""
        with self._changed:
            waiting = (self._reads, self._writes, self._clears, self._discards, self._drops)
            if not any((*waiting, self._looks)) and self._is_open:
                self._changed.wait(REFRESH_S)
            is_open = self._is_open
            if not is_open and self._writes:
                self.counts["writes_dropped"] += len(self._writes)
                self._writes.clear()
            looks, self._looks = self._looks, []
            clears, self._clears = self._clears, False
            discards, self._discards = self._discards, deque()
            reading = self._reads.popleft() if self._reads and not clears else None
            is_writing = bool(self._writes) and not clears and reading is None
            writing = self._writes.popleft() if is_writing else None
            is_busy = writing is not None and bool(self._writes)
            drops, self._drops = (set(), self._drops) if is_busy else (self._drops, set())
        self._look(looks)
        for name in discards:
            self._guarded(partial(self.file_store.remove, name))
        if clears:
            self._guarded(self.file_store.clear)
        elif reading is not None:
            self._answer(*reading, is_open)
        elif writing is not None:
            self._put(*writing)
        elif not is_open:
            return False
        if drops:
            self._guarded(partial(self.file_store.drop, drops))
        return True

    def _look(self, looks: Sequence[threading.Event]) -> None:
        """See what others have written, for whoever waits for it, and every REFRESH_S."""
        if looks or time.monotonic() - self._looked_at >= REFRESH_S:
            self._guarded(self.file_store.refresh)
            self._looked_at = time.monotonic()
        for seen in looks:
            seen.set()

    def _answer(self, names: Sequence[FileName], then: OnRead, is_open: bool) -> None:
        records: Records = [None] * len(names)

        def fetch() -> None:
            for number, name in enumerate(names):
                records[number] = self.file_store.get(name)

        if is_open:
            self._guarded(fetch)
        self._guarded(lambda: then(records))

    def _put(self, record: Record, is_needed: bool) -> None:
        is_kept = self._guarded(partial(self.file_store.put, record, is_needed))
        with self._changed:
            self.counts["writes_lost"] += not is_kept
            self._queue_bytes -= record.nbytes
            self._changed.notify_all()

    def _guarded(self, act: Callable[[], object]) -> object:
        """Return what a job does; None where it failed."""
        try:
            return act()
        except Exception:
            with self._changed:
                self.counts["jobs_failed"] += 1
            log.exception("a job of the KV disk thread failed")
        return None
