"""Tells the log how far a start, or a prefill, is while it takes long. Never what it reads."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from hearth.worker.schedule.request_state import Request

log = logging.getLogger(__name__)

TELL_S: Final = 5.0  # a start, and each prefill, says a word so often, once it took as long
_MB: Final = 1024 * 1024


class StartSteps:
    """The steps of a worker's start: what takes long is told while it does, from a thread.

    Owner: the inference thread. `begin` never blocks.
    """

    def __init__(self, held_bytes: Callable[[], int], every_s: float = TELL_S) -> None:
        """`held_bytes` is asked from another thread: what the model's arrays take by now."""
        self._held_bytes = held_bytes
        self._every_s = every_s
        self._began_at = time.monotonic()
        self._step = ("", self._began_at, 0)  # one assignment: the thread reads it as a whole
        self._taken: list[tuple[str, float]] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="start", daemon=True)
        self._thread.start()

    def begin(self, name: str, nbytes: int = 0) -> None:
        """End the step before; `nbytes` is what this one will bring into memory, where known."""
        now = time.monotonic()
        before, since, _ = self._step
        if before:
            self._taken.append((before, now - since))
        self._step = (name, now, nbytes)

    def end(self) -> str:
        """End the last step; return the seconds of all and of each, for the log."""
        self.begin("")
        self._is_over.set()
        steps = " ".join(f"{name}_s={seconds:.1f}" for name, seconds in self._taken)
        return f"start_s={time.monotonic() - self._began_at:.1f} {steps}"

    def _tell(self) -> None:
        while not self._is_over.wait(self._every_s):
            name, since, nbytes = self._step
            if not name:
                continue
            seconds = time.monotonic() - since
            held = f" held_mb={self._held_bytes() // _MB} of_mb={nbytes // _MB}" if nbytes else ""
            log.info("loading step=%s s=%.0f%s", name, seconds, held)


def tell_prefill(request: Request) -> None:
    """Say how far a long prefill is, unless it was said just now. Inference thread."""
    clock, now = request.clock, time.monotonic()
    assert clock is not None, "its first forward has begun"
    if now - clock.told_at < TELL_S:
        return
    # The newest speed: the further a prompt is, the slower it is read.
    tokens_per_s = (request.position - clock.told_tokens) / (now - clock.told_at)
    clock.told_at, clock.told_tokens = now, request.position
    log.info(
        "prefill request=%s done=%d of=%d tokens_per_s=%.0f left_s=%.0f",
        request.request_id,
        request.position,
        request.prompt_tokens,
        tokens_per_s,
        request.left_tokens / tokens_per_s if tokens_per_s else 0.0,
    )
