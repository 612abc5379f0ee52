"""The inference loop with a scripted scheduler: when it waits, what it sends, in which order."""

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hearth.shared.wire_messages import Progress, Told, Up
from hearth.worker.threads import inference_thread as loop_module
from hearth.worker.threads.inference_thread import (
    IDLE_WAIT_S,
    INBOX_DRAIN_MAX,
    InferenceThread,
)
from hearth.worker.threads.thread_queues import InferenceTask

LONG_S = 10.0


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


def turn(scheduler: ScriptedScheduler, *requests: str) -> list[Up]:
    sent: list[Up] = []
    loop, inbox = looping(scheduler, sent)
    for request in requests:
        inbox.put(request)
    loop.run_once()
    return sent


def looping(scheduler: ScriptedScheduler, sent: list[Up]) -> tuple[InferenceThread, Any]:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    loop = InferenceThread(inbox, scheduler, sent.append, lambda: False, scheduler.expire)  # type: ignore[arg-type]
    loop.checks = scheduler.checks  # type: ignore[assignment]
    return loop, inbox


def wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each wait from now on take longer than any pause of the machine."""
    for name in ("IDLE_WAIT_S", "IDLE_BEFORE_PREFILL_S", "BLOCKED_WAIT_S"):
        monkeypatch.setattr(loop_module, name, LONG_S)


def test_an_idle_loop_waits_and_does_not_step() -> None:
    scheduler = ScriptedScheduler(is_idle=True)
    loop, _ = looping(scheduler, [])
    loop.run_once()
    began = time.monotonic()
    loop.run_once()
    assert scheduler.stepped_with == []
    assert time.monotonic() - began >= IDLE_WAIT_S * 0.9


def test_memory_is_released_once_behind_all_idle_work(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    scheduler = ScriptedScheduler(is_idle=False)
    monkeypatch.setattr(
        loop_module, "release_memory", lambda: released.append(scheduler.idle_chunks)
    )
    for name in ("IDLE_WAIT_S", "IDLE_BEFORE_PREFILL_S"):
        monkeypatch.setattr(loop_module, name, getattr(loop_module, name) / 50)
    loop, inbox = looping(scheduler, [])
    for _ in range(2):
        inbox.put("a")
        loop.run_once()
        scheduler.is_idle, scheduler.idle_chunks = True, 2
        loop.run_once()
        loop.run_once()
        assert not released, (
            "not while there is idle work, nor where the next request comes at once"
        )
        for _ in range(4):
            loop.run_once()
        assert len(released) == 1 and released.pop() < 0


def test_idle_prefill_goes_on_without_waiting_until_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = ScriptedScheduler(is_idle=True)
    scheduler.idle_chunks = 3
    loop, _ = looping(scheduler, [])
    wait_long(monkeypatch)
    began = time.monotonic()
    for _ in range(3):
        loop.run_once()
    assert scheduler.idle_chunks == 0
    assert time.monotonic() - began < LONG_S


def test_expiry_goes_on_after_idle_prefill_without_waiting_and_a_request_comes_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = ScriptedScheduler(is_idle=True)
    scheduler.idle_chunks, scheduler.expiry_steps = 1, 5
    loop, inbox = looping(scheduler, [])
    wait_long(monkeypatch)
    began = time.monotonic()
    for _ in range(4):
        loop.run_once()
    assert (scheduler.idle_chunks, scheduler.expiry_steps) == (-3, 2)
    inbox.put("a")
    loop.run_once()
    assert scheduler.stepped_with == [1] and scheduler.expiry_steps == 2
    assert time.monotonic() - began < LONG_S


def test_an_inference_task_is_answered_between_steps() -> None:
    scheduler = ScriptedScheduler(is_idle=False)
    sent: list[Up] = []
    loop, inbox = looping(scheduler, sent)
    inbox.put(InferenceTask(lambda: Told("e", {})))
    loop.run_once()
    assert sent == [Told("e", {}), Progress("x", 1, 2)]


def test_a_busy_loop_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_long(monkeypatch)
    scheduler = ScriptedScheduler(is_idle=False)
    began = time.monotonic()
    turn(scheduler)
    assert scheduler.stepped_with == [0]
    assert time.monotonic() - began < LONG_S


def test_a_newcomer_is_told_that_it_is_admitted_before_anything_is_computed() -> None:
    scheduler = ScriptedScheduler(is_idle=True)
    assert turn(scheduler, "a") == [Progress("a", 0, 1), Progress("x", 1, 2)]


def test_a_flood_cannot_keep_the_engine_from_stepping() -> None:
    scheduler = ScriptedScheduler(is_idle=False)
    turn(scheduler, *[f"r{n}" for n in range(1000)])
    assert scheduler.stepped_with == [INBOX_DRAIN_MAX]


def test_checks_run_only_behind_all_other_idle_work(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = ScriptedScheduler(is_idle=True)
    scheduler.idle_chunks, scheduler.expiry_steps, scheduler.checks.steps = 1, 1, 2
    loop, _ = looping(scheduler, [])
    wait_long(monkeypatch)
    left = []
    for _ in range(4):
        loop.run_once()
        left.append(scheduler.checks.steps)
    assert left == [2, 2, 1, 0]
    assert scheduler.checks.interrupted == 0


def test_a_request_stops_the_checks_before_its_own_first_step() -> None:
    scheduler = ScriptedScheduler(is_idle=True)
    scheduler.checks.steps = 5
    seen: list[int] = []
    scheduler.step = lambda: iter(seen.append(scheduler.checks.interrupted) or ())  # type: ignore[func-returns-value,method-assign]
    turn(scheduler, "a")
    assert seen == [] or seen == [1]
    assert scheduler.checks.interrupted == 1
    assert scheduler.checks.steps == 5, "nothing is checked while a request is there"
