"""Tells the first signal that stops a process from a second one, which ends it at once.

Also names how long the parts of a stop may take, for all who wait for one.
"""

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

CHUNK_WAIT_S: Final = 15.0  # a worker ends the chunk that its GPU computes before it goes
FLUSH_WAIT_S: Final = 2.0  # then it writes what is not on disk yet
END_WAIT_S: Final = 2.0  # for what a worker does then, beside writing what it keeps


if TYPE_CHECKING:  # the installer asks for SAY_AFTER_S, and has no loop
    import asyncio

SAY_AFTER_S: Final = 1.0  # what is waited for is told, and from then on a second signal counts


class StopSignals:
    """Counts the signals that ask a process to stop. Owner: the thread that gets the signals.

    A second one within SAY_AFTER_S is the first one again: a terminal, and what was started in it,
    may both pass on one Ctrl-C. SIGHUP never counts as a second one: it is the terminal's end.
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
        """Take Ctrl-C, SIGTERM and, unless it is ignored as nohup does, the terminal's end."""
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
