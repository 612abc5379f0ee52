"""Checks that waits of the proxy's event loop have their time again after a machine's sleep."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from hearth.proxy.http import event_loop
from hearth.proxy.http.event_loop import SuspendingEventLoop
from tests.helpers.servers.sleeping_machine import SleepingUvloop

WAIT_S = 60.0


class MacLoop(SuspendingEventLoop, SleepingUvloop):
    """The proxy's loop on a uvloop whose timers all fire at a wake."""


def run(loop: uvloop.Loop, work: Coroutine[Any, Any, Any]) -> Any:
    with contextlib.closing(loop):
        return loop.run_until_complete(work)


async def waits_over_at_wake(loop: Any) -> list[str]:
    """Return which waits of a minute are over when the machine has slept for eight hours."""
    over: list[str] = []

    async def window() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await asyncio.Event().wait()

    async def wait_for() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), WAIT_S)

    kinds: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "timeout": window,
        "wait_for": wait_for,
        "sleep": lambda: asyncio.sleep(WAIT_S),
        "wait": lambda: asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=60),
    }
    tasks = [asyncio.create_task(kind(), name=name) for name, kind in kinds.items()]
    loop.call_later(WAIT_S, over.append, "call_later")
    loop.call_at(loop.time() + WAIT_S, over.append, "call_at")
    await asyncio.sleep(0.01)
    loop.sleep()
    await asyncio.sleep(0.01)
    over += [task.get_name() for task in tasks if task.done()]
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return sorted(over)


def test_no_wait_is_over_at_a_wake_before_its_time() -> None:
    loop = MacLoop()
    assert run(loop, waits_over_at_wake(loop)) == []


def test_uvloops_own_waits_are_all_over_at_a_wake() -> None:
    loop = SleepingUvloop()
    everything = ["call_at", "call_later", "sleep", "timeout", "wait", "wait_for"]
    assert run(loop, waits_over_at_wake(loop)) == everything, "else the test above shows nothing"


def test_a_wait_ends_once_its_seconds_awake_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is set by hand; uvloop's timer of a minute fires at the wake, too early."""
    now, fired = [500.0], []
    monkeypatch.setattr(event_loop, "awake_s", lambda: now[0])
    monkeypatch.setattr(event_loop, "AGAIN_S_MIN", 0.0)
    loop = MacLoop()

    async def work() -> None:
        loop.call_later(WAIT_S, fired.append, "late")
        now[0] += WAIT_S - 0.02
        loop.sleep()
        loop.call_soon(fired.append, "the wake")
        await asyncio.sleep(0)
        now[0] += 1.0
        while len(fired) < 2:
            await asyncio.sleep(0)

    run(loop, work())
    assert fired == ["the wake", "late"]


def test_a_wait_that_is_called_off_never_fires_and_says_so() -> None:
    fired: list[str] = []
    loop = MacLoop()

    async def work() -> None:
        timer = loop.call_later(WAIT_S, fired.append, "late")
        assert loop.time() < timer.when() <= loop.time() + WAIT_S and not timer.cancelled()
        timer.cancel()
        assert timer.cancelled()
        at_once = loop.call_later(0, fired.append, "at once")
        at_once.cancel()
        loop.sleep()
        await asyncio.sleep(0.01)

    run(loop, work())
    assert fired == []
