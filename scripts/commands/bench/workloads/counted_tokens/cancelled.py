"""Cancels prompts that are being read and sends them again, at once or three seconds later.

All that is read from the first sending on counts: also what a server reads for a client that has
gone, and what it reads ahead before that one comes back.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.ask import ask, errors_of
from hearth.commands.bench.workloads.counted_tokens.captured_sessions import CHAT
from hearth.commands.bench.workloads.counted_tokens.counted import measured
from hearth.commands.bench.workloads.sessions import session
from hearth.commands.replay.player import Row
from hearth.commands.replay.traces import Captured

CANCEL_SHARE: Final = 0.45  # of the time that a prompt of its length takes to its first token
# By the seconds until the prompt is sent again. At once, one tells little: how much of a chunk was
# read when the client hung up is chance.
CANCELS: Final = {0: 2, 3: 1}
_WHOLE: Final = "cancelled: a whole prompt"  # of `Visit.kept`


def prompt(visit: Visit, name: str) -> Captured:
    """Return a long prompt that shares nothing with one of another name."""
    return session(CHAT, visit, name)[-1]


async def whole(visit: Visit) -> Row:
    """Return how such a prompt went that was read whole, asked once a visit."""
    if _WHOLE not in visit.kept:
        async with measuring(visit):  # so that it rests before the first is cancelled
            (visit.kept[_WHOLE],) = await ask(visit, [prompt(visit, "cancel: whole")])
    row = visit.kept[_WHOLE]
    assert isinstance(row, Row)
    return row


async def hung_up(visit: Visit, asked: Captured, after_s: float) -> bool:
    """Send a request and hang up `after_s` later; return whether it was not answered before."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after_s):
            (row,) = await ask(visit, [asked])
            return row.tokens is None
    return True


def _cancelling(retry_s: int) -> Callable[[Visit], Awaitable[Measured]]:
    async def run(visit: Visit) -> Measured:
        first = await whole(visit)
        if first.tokens is None or first.outcome.ttft_s is None:
            return Measured({"failed": CANCELS[retry_s]}, errors=errors_of([first]))
        cancel_s = first.outcome.ttft_s * CANCEL_SHARE
        rows: list[Row] = []
        late = 0
        async with measuring(visit) as taken:
            for number in range(CANCELS[retry_s]):
                asked = prompt(visit, f"cancel: {retry_s} s, {number}")
                late += not await hung_up(visit, asked, cancel_s)
                await taken.idle(retry_s)
                rows += await ask(visit, [asked])
        told = f"{late} of {CANCELS[retry_s]} were answered before they were cancelled"
        return measured(rows, taken.values(), errors=(told,) if late else ())

    return run


WORKLOADS: Final = tuple(
    Workload(
        f"cancel-{retry_s}s",
        f"A prompt is cancelled at {CANCEL_SHARE:.0%} and sent again after {retry_s} s; "
        "what is read for nobody counts.",
        Start.FRESH,
        _cancelling(retry_s),
    )
    for retry_s in CANCELS
)
