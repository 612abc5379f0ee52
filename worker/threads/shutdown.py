"""Ends a worker's threads in an order in which no GPU is left amid its work.

Nothing but the main thread ends the process. A signal, or a thread that broke, only says here that
the worker is to end; the inference thread ends its chunk and leaves the device first.
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

EXIT_BROKEN: Final = 70  # EX_SOFTWARE: a bug, or a fault of the device; a clean start may help
JOIN_S_MAX: Final = 0.5
FETCHING: Final = "files"  # the step of a start that computes nothing, and may take hours


class Shutdown:
    """Says to all threads of a worker that it ends, and with which exit code.

    Any thread may call any method; `wait_for` blocks. A signal handler calls `begin`, so that
    there is no lock here.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` ends the wire thread's wait."""
        self.exit_code = 0
        self._wake = wake
        self._is_begun = False
        self._computes = False  # whether the device may be at work

    def begin(self, exit_code: int = 0) -> None:
        """Have the worker end; of several exit codes the first counts that is not 0."""
        self.exit_code = self.exit_code or exit_code
        self._is_begun = True
        self._wake()

    def is_begun(self) -> bool:
        return self._is_begun

    def listen(self) -> None:
        """Begin at a signal from now on. Main thread."""
        signal.signal(signal.SIGTERM, lambda *_: self.begin())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to pass on

    @property
    def is_gone(self) -> bool:
        """Whether nobody waits for a start's renderings any more: then this ends the thread."""
        if self._is_begun:
            raise SystemExit
        return False

    def note_step(self, name: str) -> None:
        """Note a step of the start, or end the thread in its place. Inference thread."""
        if self._is_begun:
            raise SystemExit
        self._computes = name != FETCHING

    @contextlib.contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Have the worker end where what runs in here, on the thread `name`, breaks."""
        try:
            yield
        except SystemExit:
            pass  # of `note_step`, or of `is_gone`
        except Exception:
            log.exception("the %s thread broke; the supervisor starts a clean worker", name)
            self.begin(EXIT_BROKEN)

    def start_thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Start a thread that works as long as the process, which ends if the thread breaks."""

        def work() -> None:
            with self.guard(name):
                run()

        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    def wait_for(self, inference: threading.Thread) -> None:
        """Wait until the inference thread has left the device, for CHUNK_WAIT_S at most."""
        inference.join(SAY_AFTER_S)
        if not (inference.is_alive() and self._computes):
            return
        until = awake_s() + CHUNK_WAIT_S - SAY_AFTER_S
        while inference.is_alive() and (left_s := until - awake_s()) > 0:
            inference.join(min(left_s, JOIN_S_MAX))  # one long wait may be over at a Mac's wake

    def note_end(self, inference: threading.Thread) -> None:
        """Note whether the device is left amid its work, now that all else is done."""
        if inference.is_alive() and self._computes:
            log.error("the chunk in flight has not ended in %g s: ended amid it", CHUNK_WAIT_S)
            self.begin(EXIT_STUCK)
