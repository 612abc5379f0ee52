"""Distinguishes the first signal, which stops a process, from the second, which ends it at once.

Also defines how long each part of a stop may take.
"""

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

CHUNK_WAIT_S: Final = 15.0  # time for the chunk that a stopping worker's GPU computes
FLUSH_WAIT_S: Final = 2.0  # time for writing what is not on disk yet
END_WAIT_S: Final = 2.0  # time for the rest of a worker's stop


if TYPE_CHECKING:  # the installer asks for SAY_AFTER_S, and has no loop
    import asyncio

SAY_AFTER_S: Final = 1.0  # after this the stop says what it waits for, and a second signal counts


class StopSignals:
    """Counts the signals that ask a process to stop. Owner: the thread that gets the signals.

    A repetition within SAY_AFTER_S does not count: a terminal and a program in it may both pass on
    one Ctrl-C. SIGHUP never counts as the second signal: it means that the terminal closed.
    """

    def __init__(
        self,
        stop: Callable[[], None],
        end_now: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stop` is called once; `end_now` gets the number of the second signal."""
        self._stop = stop
        self._end_now = end_now
        self._clock = clock
        self._first_at: float | None = None

    def listen(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Handle SIGINT, SIGTERM and SIGHUP; SIGHUP stays ignored where nohup ignores it."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self.take, number)

    def take(self, number: int) -> None:
        now = self._clock()
        if self._first_at is None:
            self._first_at = now
            self._stop()
        elif number != signal.SIGHUP and now - self._first_at >= SAY_AFTER_S:
            self._end_now(number)
