"""The inference loop with a scripted scheduler: when it waits, what it sends, in which order."""

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from hearth.shared.wire_messages import Progress, Told, Up
from hearth.worker.threads import inference_thread as loop_module
from hearth.worker.threads.inference_thread import IDLE_WAIT_S, INBOX_DRAIN_MAX, InferenceThread
from hearth.worker.threads.thread_queues import InferenceTask


class ScriptedChecks:
    def __init__(self) -> None:
        self.steps = 0
        self.interrupted = 0

    def step(self) -> bool:
        self.steps -= 1
        return self.steps >= 0

    def interrupt(self) -> None:
        self.interrupted += 1


class ScriptedScheduler:
    def __init__(self, is_idle: bool) -> None:
        self.is_idle = is_idle
        self.taken: list[str] = []
        self.stepped_with: list[int] = []
        self.idle_chunks = 0
        self.expiry_steps = 0
        self.is_blocked = False
        self.checks = ScriptedChecks()

    def submit(self, request: str) -> Progress:
        self.taken.append(request)
        self.is_idle = False
        return Progress(request, 0, 1)

    def prefill_idle(self) -> bool:
        self.idle_chunks -= 1
        return self.idle_chunks >= 0

    def expire(self) -> bool:
        assert self.is_idle and self.idle_chunks < 0, "only once there is nothing to compute"
        self.expiry_steps -= 1
        return self.expiry_steps >= 0

    def step(self) -> Iterator[Up]:
        self.stepped_with.append(len(self.taken))
        yield Progress("x", 1, 2)


class Inbox:
    """What has come, and how long was waited where nothing had."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.waits: list[float] = []

    def get(self, block: bool, timeout: float | None) -> Any:
        if self.items:
            return self.items.pop(0)
        self.waits.append(timeout or 0.0)
        raise queue.Empty


class Loop:
    """A loop over a scripted scheduler."""

    def __init__(
        self, is_idle: bool, idle_chunks: int = 0, expiry: int = 0, checks: int = 0
    ) -> None:
        self.scheduler, self.inbox = ScriptedScheduler(is_idle), Inbox()
        self.scheduler.idle_chunks, self.scheduler.expiry_steps = idle_chunks, expiry
        self.checks = self.scheduler.checks
        self.checks.steps = checks
        self.sent: list[Up] = []
        parts: Any = (self.inbox, self.scheduler, self.sent.append, lambda: False)
        self.thread = InferenceThread(*parts, self.scheduler.expire)
        self.thread.checks = self.checks  # type: ignore[assignment]

    def run(self, turns: int = 1, *items: Any) -> list[float]:
        """Do some turns, the first with these items; return the waits."""
        self.inbox.items += items
        self.inbox.waits.clear()
        for _ in range(turns):
            self.thread.run_once()
        return self.inbox.waits


def test_an_idle_loop_waits_and_does_not_step() -> None:
    loop = Loop(is_idle=True)
    assert loop.run(3)[1:] == [IDLE_WAIT_S] * 2
    assert loop.scheduler.stepped_with == []
    assert loop.run(1, "a") == [0.0], "once something has come, nothing more is waited for"


def test_memory_is_released_once_behind_all_idle_work(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, released = Loop(is_idle=False), list[int]()
    monkeypatch.setattr(
        loop_module, "release_memory", lambda: released.append(loop.scheduler.idle_chunks)
    )
    for _ in range(2):
        loop.run(1, "a")
        loop.scheduler.is_idle, loop.scheduler.idle_chunks = True, 2
        loop.run(2)
        assert not released, "not while there is idle work, nor where the next comes at once"
        loop.run(4)
        assert len(released) == 1 and released.pop() < 0


def test_idle_work_goes_on_without_waiting_in_its_order_until_there_is_none() -> None:
    loop = Loop(is_idle=True, idle_chunks=1, expiry=2, checks=2)
    left = []
    for _ in range(5):
        waits = loop.run()
        left.append((loop.scheduler.idle_chunks, loop.scheduler.expiry_steps, loop.checks.steps))
        assert len(left) == 1 or waits == [0.0]
    assert left == [(0, 2, 2), (-1, 1, 2), (-2, 0, 2), (-3, -1, 1), (-4, -2, 0)]
    assert loop.checks.interrupted == 0
    loop.run(2)
    assert loop.run(1)[0] > 0, "there is none any more"


def test_a_request_comes_before_idle_work_and_stops_the_checks() -> None:
    loop = Loop(is_idle=True, expiry=5, checks=5)
    loop.run(1)
    loop.run(1, "a")
    assert loop.sent == [Progress("a", 0, 1), Progress("x", 1, 2)], "admitted, then computed"
    assert (loop.scheduler.stepped_with, loop.scheduler.expiry_steps) == ([1], 4)
    assert (loop.checks.interrupted, loop.checks.steps) == (1, 5)


def test_an_inference_task_is_answered_between_steps() -> None:
    loop = Loop(is_idle=False)
    loop.run(1, InferenceTask(lambda: Told("e", {})))
    assert loop.sent == [Told("e", {}), Progress("x", 1, 2)]


def test_a_busy_loop_never_waits_and_a_blocked_one_does_not_spin() -> None:
    loop = Loop(is_idle=False)
    assert loop.run(3) == [0.0] * 3 and loop.scheduler.stepped_with == [0] * 3
    loop.scheduler.is_blocked = True
    assert loop.run(2) == [loop_module.BLOCKED_WAIT_S] * 2


def test_a_flood_cannot_keep_the_engine_from_stepping() -> None:
    loop = Loop(is_idle=False)
    loop.run(1, *[f"r{n}" for n in range(1000)])
    assert loop.scheduler.stepped_with == [INBOX_DRAIN_MAX]
