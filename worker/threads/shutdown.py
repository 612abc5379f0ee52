"""Ends a worker's threads in an order that never interrupts a computing GPU.

Only the main thread ends the process. A signal or a broken thread only begins the shutdown;
the inference thread first finishes its chunk and leaves the device.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Final

from hearth.shared.errors import EXIT_STUCK
from hearth.shared.stop_signals import CHUNK_WAIT_S, SAY_AFTER_S
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)

EXIT_BROKEN: Final = 70  # EX_SOFTWARE: a bug or a device fault; a clean start may help
JOIN_S_MAX: Final = 0.5
FETCHING: Final = "files"  # step of a start that computes nothing, perhaps for hours


class Shutdown:
    """Tells all threads that the worker ends, and holds the exit code.

    Any thread may call any method; `wait_for` blocks. A signal handler calls `begin`, so this class
    takes no lock.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` ends the wire thread's wait."""
        self.exit_code = 0
        self._wake = wake
        self._is_begun = False
        self._computes = False  # whether the device may be computing

    def begin(self, exit_code: int = 0) -> None:
        """Begin the end of the worker; the first exit code that is not 0 counts."""
        self.exit_code = self.exit_code or exit_code
        self._is_begun = True
        self._wake()

    def is_begun(self) -> bool:
        return self._is_begun

    def listen(self) -> None:
        """Install the signal handlers: SIGTERM begins the shutdown. Main thread."""
        signal.signal(signal.SIGTERM, lambda *_: self.begin())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C

    @property
    def is_gone(self) -> bool:
        """False while the worker goes on; ends the calling thread once the shutdown has begun.

        With this, `while_client_waits` stops renderings of a start as if a client had left.
        """
        if self._is_begun:
            raise SystemExit
        return False

    def record_step(self, name: str) -> None:
        """Record a step of the start, or end the thread in a shutdown. Inference thread."""
        if self._is_begun:
            raise SystemExit
        self._computes = name != FETCHING

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Begin the shutdown if the code in this context, on the thread `name`, raises."""
        try:
            yield
        except SystemExit:
            pass  # raised by `record_step` or `is_gone`
        except Exception:
            log.exception("the %s thread broke; the supervisor starts a clean worker", name)
            self.begin(EXIT_BROKEN)

    def start_thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Start a daemon thread; the worker ends if the thread raises."""

        def work() -> None:
            with self.guard(name):
                run()

        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def wait_for(self, inference: threading.Thread) -> None:
        """Wait at most CHUNK_WAIT_S until the inference thread has left the device."""
        inference.join(SAY_AFTER_S)
        if not (inference.is_alive() and self._computes):
            return
        until = awake_s() + CHUNK_WAIT_S - SAY_AFTER_S
        while inference.is_alive() and (left_s := until - awake_s()) > 0:
            # Short waits, because one long wait may end late after a Mac slept.
            inference.join(min(left_s, JOIN_S_MAX))

    def record_end(self, inference: threading.Thread) -> None:
        """Set the exit code EXIT_STUCK if the device is still computing. Called last."""
        if inference.is_alive() and self._computes:
            log.error("the chunk in flight has not ended in %g s: ended amid it", CHUNK_WAIT_S)
            self.begin(EXIT_STUCK)
