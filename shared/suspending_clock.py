"""Tells the time that passed while this machine was awake: the clock of every wait and lease.

No clock of the system does so everywhere. While a Mac sleeps `time.monotonic` stands still, but
`time.time` and uvloop's `loop.time` go on; where a virtual machine is paused, all of them go on.
What is meant in the time of day (the bytes written today, what was stored for 30 days) is measured
with `time.time`.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

# A process reads its clock every second: the proxy's event loop and a worker's wire thread do.
# Where it has not for so long, it was not running.
STEP_S_MAX: Final = 5.0


class SuspendingClock:
    """Counts seconds, but not those in which nobody read it for longer than STEP_S_MAX.

    Only for waits of a process that reads it every second, whatever else it does. Any thread.
    Invariant: `now` never goes back.
    """

    def __init__(self, clock: Callable[[], float] = lambda: time.monotonic()) -> None:
        """`clock` may jump forward; the default is looked up at each call."""
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = clock()
        self._left_out_s = 0.0

    def now(self) -> float:
        """Return the seconds; they begin at those of the underlying clock."""
        with self._lock:
            read_at = self._clock()
            step_s = read_at - self._read_at
            if not 0 <= step_s <= STEP_S_MAX:
                self._left_out_s += step_s
            self._read_at = read_at
            return read_at - self._left_out_s


awake_s: Final = SuspendingClock().now
