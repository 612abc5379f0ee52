"""Measures the time that passed while this machine was awake: the clock of every wait and lease.

No system clock does so everywhere. While a Mac sleeps, `time.monotonic` stands still, but
`time.time` and uvloop's `loop.time` go on; while a virtual machine is paused, all of them go on.
Calendar time (the bytes written today, the age of files) is measured with `time.time`.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

# The proxy's event loop and a worker's wire thread read the clock every second. A longer gap means
# that the process was not running.
STEP_S_MAX: Final = 5.0


class SuspendingClock:
    """Counts seconds, and leaves out gaps between two reads that exceed STEP_S_MAX.

    Only for processes that read it every second. Any thread.
    Invariant: `now` never goes back.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        """`clock` may jump forward; the default is looked up at each call."""
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = clock()
        self._left_out_s = 0.0

    def now(self) -> float:
        """Return the seconds awake; the count begins at the underlying clock's value."""
        with self._lock:
            read_at = self._clock()
            step_s = read_at - self._read_at
            if not 0 <= step_s <= STEP_S_MAX:
                self._left_out_s += step_s
            self._read_at = read_at
            return read_at - self._left_out_s


awake_s: Final = SuspendingClock().now
