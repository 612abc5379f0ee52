"""Asks a server that was started again for the next turn: after a clean stop, after kill -9.

`restart` goes on with the linear session, which the fresh server has read. `before-kill` reads a
session that is new to the server, shortly before it is killed; `kill` goes on with that one. It is
as long as one of the day's, so that it fits in the memory that a server has after the kill. The
ideal reads of each next turn what is new in it.
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
    made_session,
)
from hearth.commands.bench.workloads.sessions import salt
from hearth.commands.replay.player import Row
from hearth.commands.replay.traces import Captured

RESTART, BEFORE_KILL, KILL = "restart", "before-kill", "kill"
TURNS: Final = 3  # before the kill
BY_URL: Final = "nobody restarts a server by URL"
NOT_READ: Final = "nothing was read before the {0}: play the workload {1} too"


def session_to_kill(visit: Visit) -> list[Captured]:
    """Return the session that is read before the kill, and its turn that comes after it."""
    return made_session(KILL, 0, visit.scale.day_tokens, TURNS + 1, salt(visit, KILL))


def next_turn(row: Captured) -> Captured:
    """Return the request that goes on with a chat: a made-up answer and a question more."""
    assert row.dialect == "chat", row.dialect
    said = {"role": "assistant", "content": filler(ANSWER_TOKENS, f"{RESTART} answer")}
    asked = {"role": "user", "content": filler(QUESTION_TOKENS, f"{RESTART} question")}
    messages = [*row.body["messages"], said, asked]
    return replace(row, body={**row.body, "messages": messages}, said="")


async def run_restart(visit: Visit) -> Measured:
    asked = next_turn(linear_session(visit)[-1])
    return await _gone_on(visit, asked, READ_ROWS, NOT_READ.format("restart", "answers"))


async def run_before_kill(visit: Visit) -> Measured:
    if visit.server.url:
        return Measured({}, errors=(BY_URL,))
    async with measuring(visit) as taken:
        done = await ask(visit, session_to_kill(visit)[:TURNS], is_serial=True)
    visit.kept[BEFORE_KILL] = done
    return measured(done, taken.values())


async def run_kill(visit: Visit) -> Measured:
    asked = session_to_kill(visit)[TURNS]
    return await _gone_on(visit, asked, BEFORE_KILL, NOT_READ.format("kill", BEFORE_KILL))


async def _gone_on(visit: Visit, asked: Captured, kept: str, not_read: str) -> Measured:
    """Ask one prompt more of a session; what of it was read before is under `kept`."""
    before = cast(Sequence[Row], visit.kept.get(kept, ()))
    if visit.server.url or not before or before[-1].tokens is None:
        return Measured({}, errors=(BY_URL if visit.server.url else not_read,))
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
        "The next turn of the linear session, after a clean stop and start.",
        Start.RESTARTED,
        run_restart,
        read_tokens=lambda _: TURN_TOKENS,
    ),
    Workload(
        BEFORE_KILL,
        f"A session of {TURNS} turns, new to the server, just before it is killed.",
        Start.RESTARTED,
        run_before_kill,
        read_tokens=lambda scale: scale.day_tokens + TURNS * TURN_TOKENS,
    ),
    Workload(
        KILL,
        "The next turn of that session, after kill -9 and a start.",
        Start.KILLED,
        run_kill,
        read_tokens=lambda _: TURN_TOKENS,
    ),
)
