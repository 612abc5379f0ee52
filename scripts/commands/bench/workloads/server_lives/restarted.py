"""Asks a server that was stopped and started again for the next turn of the linear session.

The ideal reads of it what is new in it. All other workloads of the fresh start come in between.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.ask import ask
from hearth.commands.bench.workloads.counted_tokens.counted import measured
from hearth.commands.bench.workloads.filler import filler
from hearth.commands.bench.workloads.server_lives.answers import READ_ROWS, linear_session
from hearth.commands.bench.workloads.server_lives.made_sessions import (
    ANSWER_TOKENS,
    QUESTION_TOKENS,
    TURN_TOKENS,
)
from hearth.commands.replay.player import Row
from hearth.commands.replay.traces import Captured

RESTART: Final = "restart"
NOT_RESTARTED: Final = "nobody restarts a server by URL"
NOT_READ: Final = "nothing was read before the {0}: play the workload {1} too"


def next_turn(row: Captured) -> Captured:
    """Return the request that goes on with a chat: a made-up answer and a question more."""
    assert row.dialect == "chat", row.dialect
    said = {"role": "assistant", "content": filler(ANSWER_TOKENS, f"{RESTART} answer")}
    asked = {"role": "user", "content": filler(QUESTION_TOKENS, f"{RESTART} question")}
    messages = [*row.body["messages"], said, asked]
    return replace(row, body={**row.body, "messages": messages}, said="")


async def run_restart(visit: Visit) -> Measured:
    asked = next_turn(linear_session(visit)[-1])
    return await go_on(visit, asked, READ_ROWS, NOT_READ.format("restart", "answers"))


async def go_on(visit: Visit, asked: Captured, kept: str, not_read: str) -> Measured:
    """Ask one prompt more of a session; what of it was read before is under `kept`."""
    before = cast(Sequence[Row], visit.kept.get(kept, ()))
    if visit.server.url or not before or before[-1].tokens is None:
        return Measured({}, errors=(NOT_RESTARTED if visit.server.url else not_read,))
    async with measuring(visit) as taken:
        done = await ask(visit, [asked], is_serial=True)
    found = measured(done, taken.values(), before=before)
    return replace(found, values={**found.values, **start_of(visit)})


def start_of(visit: Visit) -> dict[str, float]:
    """Return how long the server took to be ready, where that is known."""
    start_s = getattr(visit.running, "start_s", None)
    return {} if start_s is None else {"start_s": float(start_s)}


WORKLOADS: Final = (
    Workload(
        RESTART,
        "The next turn of the linear session, after all other workloads of a fresh start, a clean "
        "stop and a start. A server that keeps few sessions may have lost this one before it was "
        "stopped: played with linear and answers alone, it shows the restart alone.",
        Start.RESTARTED,
        run_restart,
        read_tokens=lambda _: TURN_TOKENS,
    ),
)
