"""Whoever cancels a request that waits for its work ends it, whatever happens meanwhile."""

import asyncio
import itertools
from typing import Any, NamedTuple

import pytest

from hearth.proxy.http.http_exchange import AsgiMessage, BodyBudget, ClientGone, HttpExchange
from hearth.shared.errors import RequestError

STEPS = 6  # of the event loop in which something may happen
ENDS = ("value", "refusal", "bug")  # of work that is left alone
# What work does that is cancelled.
MANNERS = ("ends", "ends late", "refuses", "breaks", "answers", "ignores it once")
REFUSAL, BUG = RequestError("no", status=400), ValueError("a bug")


class Moments(NamedTuple):
    """What happens, and at which step: None = never."""

    leaves: int | None
    cancelled: int | None
    finishes: int | None


async def work(finish: asyncio.Event, end: str, manner: str) -> str:
    try:
        await finish.wait()
    except asyncio.CancelledError:
        if manner == "ignores it once":
            await finish.wait()
            return "late"
        if manner == "ends late":
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        if manner == "refuses":
            raise REFUSAL from None
        if manner == "breaks":
            raise BUG from None
        if manner == "answers":
            return "in spite of it"
        raise
    if end == "refusal":
        raise REFUSAL
    if end == "bug":
        raise BUG
    return "done"


def exchange_of(gone: asyncio.Event) -> HttpExchange:
    async def receive() -> AsgiMessage:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(_: AsgiMessage) -> None: ...

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    return HttpExchange(scope, receive, send, BodyBudget())


async def played(moments: Moments, end: str, manner: str) -> tuple[Any, bool, list[Any]]:
    """Return how the caller ended, whether its cancellation was taken, and what was logged."""
    gone, finish = asyncio.Event(), asyncio.Event()
    logged: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    exchange = exchange_of(gone)
    inner = asyncio.create_task(work(finish, end, manner))
    caller = asyncio.create_task(exchange.while_connected(inner))
    was_over: list[bool] = []  # when the caller ended
    caller.add_done_callback(lambda _: was_over.append(inner.done()))
    was_taken = False
    await asyncio.sleep(0)  # a coroutine that was never begun could end nothing
    for step in range(STEPS):
        if step == moments.leaves:
            gone.set()
        if step == moments.finishes:
            finish.set()
        if step == moments.cancelled:
            was_taken = caller.cancel()
        await asyncio.sleep(0)
    for _ in range(STEPS):
        await asyncio.sleep(0)
    finish.set()  # work that ignores one cancellation ends now
    await asyncio.wait({caller, inner})
    assert was_over == [True] or moments.leaves is not None, "work outlives its caller"
    exchange.end()
    outcome = "cancelled" if caller.cancelled() else caller.exception() or caller.result()

    return outcome, was_taken, logged


CASES = [
    Moments(*steps) for steps in itertools.product((None, *range(STEPS)), repeat=3) if any(steps)
]


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("end", ENDS)
async def test_a_cancellation_of_the_caller_is_never_swallowed(end: str, manner: str) -> None:
    """In every order of the client's leaving, the work's end and the cancellation."""
    ended = {"value": "done", "refusal": REFUSAL, "bug": BUG}[end]

    taken = 0
    for moments in CASES:
        outcome, was_taken, logged = await played(moments, end, manner)
        taken += was_taken
        assert (outcome == "cancelled") == was_taken, (moments, outcome)
        assert not logged, (moments, logged)
        if not was_taken and moments.leaves is None:
            assert outcome is ended, (moments, outcome)
        if not was_taken and moments.finishes is None and moments.leaves is not None:
            is_broken = manner == "breaks" and outcome is BUG
            assert isinstance(outcome, ClientGone) or is_broken, (moments, outcome)
    assert taken > len(CASES) / 4
