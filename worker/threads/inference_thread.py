"""Runs the inference thread's loop: drains the inbox, steps the scheduler, sends messages."""

import queue
from collections.abc import Callable

import mlx.core as mx

from hearth.shared.wire_messages import Up
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.doctor.idle_checks import IdleChecks
from hearth.worker.kv.memory_release import release_memory
from hearth.worker.schedule.request_state import RecallDone
from hearth.worker.schedule.scheduler import Scheduler
from hearth.worker.threads.thread_queues import Inbox, InferenceTask

INBOX_DRAIN_MAX = 64  # most items between two steps, to limit the stall of requests
IDLE_WAIT_S = 0.25  # most seconds until an idle worker notices a shutdown
IDLE_BEFORE_PREFILL_S = 0.05  # idle seconds before idle prefill begins
BLOCKED_WAIT_S = 0.05  # most seconds until a lost client is noticed while all wait for the disk
SWEEP_EVERY_TURNS = 64


class InferenceThread:
    """Alternates between the inbox and the scheduler. Owner: the inference thread.

    Invariant: no other thread touches the model or an array that the model computed.

    Any exception ends the process on purpose: after an unexpected error the caches cannot be
    trusted, and the supervisor starts a clean worker.
    """

    def __init__(
        self,
        inbox: Inbox,
        scheduler: Scheduler,
        send: Callable[[Up], None],
        sweep: Callable[[], bool],
        expire: Callable[[], bool],
        watch_memory: Callable[[], int] = mx.get_active_memory,
    ) -> None:
        """`watch_memory` is called after each turn and returns the bytes in use.

        `sweep` and `expire` return whether they released anything or have more to do.
        """
        self._inbox = inbox
        self._scheduler = scheduler
        self._send = send
        self._sweep = sweep
        self._expire = expire
        self.checks: IdleChecks | None = None  # run when no other idle work is left
        self._watch_memory = watch_memory
        self._idle_wait_s = IDLE_BEFORE_PREFILL_S
        self._has_stepped = False  # whether a step was done since memory was last released
        self._turns = 0  # turns of the loop
        self.active_bytes = 0  # bytes in use after the last turn; any thread may read this

    def run_once(self) -> None:
        """Do one turn of the loop. This blocks only if there is nothing to compute."""
        self._drain(self._wait_s())
        if not self._scheduler.is_idle:
            if self.checks is not None:
                self.checks.interrupt()
            for message in self._scheduler.step():
                self._send(message)
            self._idle_wait_s = IDLE_BEFORE_PREFILL_S
            self._has_stepped = True
        elif (
            self._scheduler.prefill_idle()
            or self._expire()
            or (self.checks is not None and self.checks.step())
        ):
            self._idle_wait_s = 0.0
        elif self._idle_wait_s < IDLE_WAIT_S:
            self._idle_wait_s = IDLE_WAIT_S
        elif self._has_stepped:
            # Decoding leaves free buffers, which may be as large as the grown caches.
            release_memory()
            self._has_stepped = False
        self._turns += 1
        if self._turns % SWEEP_EVERY_TURNS == 0 and self._sweep():
            mx.clear_cache()
        self.active_bytes = self._watch_memory()

    def _wait_s(self) -> float:
        """Return how many seconds to wait for the inbox; 0 while there is work."""
        if self._scheduler.is_idle:
            return self._idle_wait_s
        return BLOCKED_WAIT_S if self._scheduler.is_blocked else 0.0

    def _drain(self, wait_s: float) -> None:
        for _ in range(INBOX_DRAIN_MAX):
            try:
                item = self._inbox.get(block=wait_s > 0, timeout=wait_s or None)
            except queue.Empty:
                return
            match item:
                case InferenceTask():
                    self._send(item.run())
                case PrefixQuery():
                    self._scheduler.prefill_later(item)
                case RecallDone():
                    self._scheduler.take_recalled(item)
                case _:
                    self._send(self._scheduler.submit(item))
            wait_s = 0.0
