"""Logs how far a start, or a long prefill, has come; never what a prompt says."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Heartbeat
from hearth.worker.schedule.request_state import Request

log = logging.getLogger(__name__)

LOG_EVERY_S: Final = 5.0  # a start, and each prefill, is logged so often, once it took as long
_MB: Final = 1024 * 1024


class StartSteps:
    """Times the steps of a worker's start, and logs a long one while it runs, from a thread.

    Owner: the inference thread. `begin` never blocks.
    """

    def __init__(
        self,
        held_bytes: Callable[[], int],
        every_s: float = LOG_EVERY_S,
        on_step: Callable[[str], None] = lambda _name: None,
    ) -> None:
        """`held_bytes` returns what the model's arrays take by now; another thread calls it.

        `on_step` is told of each step before it is taken, and may raise in its place.
        """
        self._held_bytes = held_bytes
        self._on_step = on_step
        self._every_s = every_s
        self._began_at = time.monotonic()
        self._step = ("", self._began_at, 0)  # one assignment: the thread reads it as a whole
        self._taken: list[tuple[str, float]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._log_steps, name="start", daemon=True)
        self._thread.start()

    def begin(self, name: str, nbytes: int = 0) -> None:
        """End the step before; `nbytes` is what this one will bring into memory, where known."""
        if name:
            self._on_step(name)
        now = time.monotonic()
        before, since, _ = self._step
        if before:
            self._taken.append((before, now - since))
        self._step = (name, now, nbytes)

    def heartbeat(self) -> Heartbeat:
        """Return what a worker tells of itself while it loads its model. Any thread."""
        name, since, nbytes = self._step
        return Heartbeat(
            *("loading", 0, 0, 0, 0, None),
            step=name,
            step_s=time.monotonic() - since if name else 0.0,
            step_bytes=nbytes,
            held_bytes=min(self._held_bytes(), nbytes) if nbytes else 0,
        )

    def end(self) -> str:
        """End the last step; return the seconds of all and of each, for the log."""
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


def log_prefill(request: Request) -> None:
    """Log how far a long prefill has come, unless it was logged just now. Inference thread."""
    times, now = request.times, awake_s()
    assert times is not None and times.logged_tokens <= request.position, request.request_id
    if now - times.logged_at < LOG_EVERY_S:
        return
    # The newest speed: the further a prompt is, the slower it is read.
    tokens_per_s = (request.position - times.logged_tokens) / (now - times.logged_at)
    times.logged_at, times.logged_tokens = now, request.position
    log.info(
        "prefill request=%s done=%d of=%d tokens_per_s=%.0f left_s=%.0f",
        request.request_id,
        request.position,
        request.prompt_tokens,
        tokens_per_s,
        request.left_tokens / tokens_per_s if tokens_per_s else 0.0,
    )
