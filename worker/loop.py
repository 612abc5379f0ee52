"""The inference thread's loop: drain the inbox, step the scheduler once, send what it says."""

import queue
from collections.abc import Callable

import mlx.core as mx

from shared.wire import Up
from worker.request import Request
from worker.scheduler import Scheduler

INBOX_DRAIN_MAX = 64  # requests taken between two steps: bounds the stall of running ones
IDLE_WAIT_S = 0.25  # how late an idle worker sees that it should stop


class InferenceLoop:
    """Owns the only thread that touches the model and everything that it computed.

    Any exception ends the process on purpose: what is in the caches after a surprise cannot be
    trusted, and the supervisor starts a clean worker.
    """

    def __init__(
        self, inbox: "queue.SimpleQueue[Request]", scheduler: Scheduler, send: Callable[[Up], None]
    ) -> None:
        self._inbox = inbox
        self._scheduler = scheduler
        self._send = send
        self.active_bytes = 0  # MLX memory in use after the last step; others may read it

    def run_once(self) -> None:
        """One turn. Blocks only when there is nothing to compute."""
        wait_s = IDLE_WAIT_S if self._scheduler.is_idle else 0.0
        for _ in range(INBOX_DRAIN_MAX):
            try:
                request = self._inbox.get(block=wait_s > 0, timeout=wait_s or None)
            except queue.Empty:
                break
            self._send(self._scheduler.submit(request))
            wait_s = 0.0
        if not self._scheduler.is_idle:
            for message in self._scheduler.step():
                self._send(message)
            self.active_bytes = mx.get_active_memory()
