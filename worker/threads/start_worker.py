"""Starts a worker process of either kind, and reports the progress or the failure of its start."""

import argparse
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.process_start import begin_process
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import Heartbeat
from hearth.shared.worker_files import leave_reason


def run_worker(
    prog: str, about: str | None, kind: str, make: Callable[[Settings, argparse.Namespace], Any]
) -> int:
    """Make a worker, run it and return its exit code. `kind` names the process in its log."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("--worker-id", type=int, required=True)
    parser.add_argument("--endpoint", required=True, help="ipc://PATH, the supervisor's")
    parser.add_argument("--listen", default="", help="tcp://ADDRESS:PORT, for other machines")
    options = parser.parse_args()
    try:
        worker = make(begin_process(f"{kind}-{options.worker_id}"), options)
    except StartError as error:
        return refuse_start(options.endpoint, error)
    return int(worker.run())


def refuse_start(endpoint: str, error: StartError) -> int:
    """Report to the log and the supervisor why a worker cannot start; return its exit code."""
    print(f"Hearth cannot start: {error}", file=sys.stderr, flush=True)
    leave_reason(endpoint, str(error))
    return EXIT_CANNOT_START


log = logging.getLogger(__name__)

LOG_EVERY_S: Final = 5.0  # seconds between two log lines of a long start
_MB: Final = 1024 * 1024


class StartSteps:
    """Times the steps of a worker's start, and logs a long step from a thread while it runs.

    Owner: the inference thread. `begin` never blocks.
    """

    def __init__(
        self,
        held_bytes: Callable[[], int],
        every_s: float = LOG_EVERY_S,
        on_step: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """`held_bytes` returns the present bytes of the model's arrays; another thread calls it.

        Before each step, `on_step` is called with the step's name, and may raise to prevent the
        step.
        """
        self._held_bytes = held_bytes
        self._on_step = on_step
        self._every_s = every_s
        self._began_at = time.monotonic()
        # Name, start and bytes of the current step; one assignment, because a thread reads it.
        self._step = ("", self._began_at, 0)
        self._taken: list[tuple[str, float]] = []  # names and seconds of the finished steps
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._log_steps, name="start", daemon=True)
        self._thread.start()

    def begin(self, name: str, nbytes: int = 0) -> None:
        """Begin a step, which will load `nbytes` into memory; 0 = not known."""
        if name:
            self._on_step(name)
        now = time.monotonic()
        before, since, _ = self._step
        if before:
            self._taken.append((before, now - since))
        self._step = (name, now, nbytes)

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat while the model is loaded. Any thread."""
        name, since, nbytes = self._step
        return Heartbeat(
            "loading",
            0,
            0,
            0,
            0,
            None,
            step=name,
            step_s=time.monotonic() - since if name else 0.0,
            step_bytes=nbytes,
            held_bytes=min(self._held_bytes(), nbytes) if nbytes else 0,
        )

    def end(self) -> str:
        """End the last step; return the log's text on the seconds of the start and of each step."""
        self.begin("")
        self._is_over.set()
        steps = " ".join(f"{name}_s={seconds:.1f}" for name, seconds in self._taken)
        return f"start_s={time.monotonic() - self._began_at:.1f} {steps}"

    def _log_steps(self) -> None:
        while not self._is_over.wait(self._every_s):
            name, since, nbytes = self._step
            if not name:
                continue
            seconds = time.monotonic() - since
            held = f" held_mb={self._held_bytes() // _MB} of_mb={nbytes // _MB}" if nbytes else ""
            log.info("loading step=%s s=%.0f%s", name, seconds, held)
