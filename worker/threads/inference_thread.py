"""Runs the inference thread's loop: drains the inbox, steps the scheduler, sends its messages."""

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

INBOX_DRAIN_MAX = 64  # requests taken between two steps: bounds the stall of running ones
IDLE_WAIT_S = 0.25  # how late an idle worker sees that it should stop
IDLE_BEFORE_PREFILL_S = 0.05  # a worker is idle this long before it prefills what may come
BLOCKED_WAIT_S = 0.05  # how late a client is seen to leave while all wait for the disk
SWEEP_EVERY_TURNS = 64


class InferenceThread:
    """Takes turns of the inbox and the scheduler. Owner: the inference thread.

    Invariant: no other thread touches the model, nor anything that it computed.

    Any exception ends the process on purpose: what is in the caches after a surprise cannot be
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
        """`watch_memory` is called after each turn; it returns the bytes that are in use."""
        self._inbox = inbox
        self._scheduler = scheduler
        self._send = send
        self._sweep = sweep
        self._expire = expire
        self.checks: IdleChecks | None = None  # which run behind all other idle work
        self._watch_memory = watch_memory
        self._idle_wait_s = IDLE_BEFORE_PREFILL_S
        self._has_stepped = False  # since memory was released
        self._turns = 0  # of the loop
        self.active_bytes = 0  # memory in use after the last turn; others may read it

    def run_once(self) -> None:
        """One turn. Blocks only when there is nothing to compute."""
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
            # Decoding leaves buffers, which may be as large as the caches that have grown.
            release_memory()
            self._has_stepped = False
        self._turns += 1
        if self._turns % SWEEP_EVERY_TURNS == 0 and self._sweep():
            mx.clear_cache()
        self.active_bytes = self._watch_memory()

    def _wait_s(self) -> float:
        """Return how long there is nothing to do but to wait for the inbox."""
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
