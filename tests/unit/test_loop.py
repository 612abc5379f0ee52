"""The inference loop with a scripted scheduler: when it waits, what it sends, in which order."""

import queue
import time
from collections.abc import Iterator

from shared.wire import Admitted, Progress, Up
from worker.loop import IDLE_WAIT_S, INBOX_DRAIN_MAX, InferenceLoop


class ScriptedScheduler:
    def __init__(self, is_idle: bool) -> None:
        self.is_idle = is_idle
        self.taken: list[str] = []
        self.stepped_with: list[int] = []

    def submit(self, request: str) -> Admitted:
        self.taken.append(request)
        self.is_idle = False
        return Admitted(request, 1, 0)

    def step(self) -> Iterator[Up]:
        self.stepped_with.append(len(self.taken))
        yield Progress("x", 1, 2)


def turn(scheduler: ScriptedScheduler, *requests: str) -> list[Up]:
    sent: list[Up] = []
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    for request in requests:
        inbox.put(request)
    loop = InferenceLoop(inbox, scheduler, sent.append)  # type: ignore[arg-type]
    loop.run_once()
    return sent


def test_an_idle_loop_waits_a_little_and_does_not_step() -> None:
    scheduler = ScriptedScheduler(is_idle=True)
    began = time.monotonic()
    assert turn(scheduler) == [] and scheduler.stepped_with == []
    assert time.monotonic() - began >= IDLE_WAIT_S * 0.9


def test_a_busy_loop_never_waits() -> None:
    scheduler = ScriptedScheduler(is_idle=False)
    began = time.monotonic()
    turn(scheduler)
    assert scheduler.stepped_with == [0]
    assert time.monotonic() - began < IDLE_WAIT_S / 2


def test_a_newcomer_is_told_that_it_is_admitted_before_anything_is_computed() -> None:
    scheduler = ScriptedScheduler(is_idle=True)
    assert turn(scheduler, "a") == [Admitted("a", 1, 0), Progress("x", 1, 2)]


def test_a_flood_cannot_keep_the_engine_from_stepping() -> None:
    scheduler = ScriptedScheduler(is_idle=False)
    turn(scheduler, *[f"r{n}" for n in range(1000)])
    assert scheduler.stepped_with == [INBOX_DRAIN_MAX]
