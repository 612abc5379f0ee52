"""A request that waits for a worker ends when it is cancelled, whatever happens meanwhile."""

import asyncio

import pytest

from hearth.proxy.pool.waiting_requests import ModelRequest, WaitingRequests
from hearth.shared.suspending_clock import awake_s


@pytest.mark.parametrize("steps_between", range(6))
async def test_a_cancellation_is_not_swallowed_as_everyone_is_woken(steps_between: int) -> None:
    """Before Python 3.12 `asyncio.wait_for` drops one that comes as what it waits for ends."""

    waiting = WaitingRequests()
    request = ModelRequest("", awake_s())
    task: asyncio.Task[None] = asyncio.create_task(waiting.wait_for_worker(request, lambda: None))
    while not waiting.requests:
        await asyncio.sleep(0)
    waiting.wake()
    for _ in range(steps_between):
        await asyncio.sleep(0)
    assert task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and not waiting.requests
