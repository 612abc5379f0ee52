"""Asks a server for the next turn of a session that it has read before it was stopped or killed.

`restart` goes on with the linear session after a clean stop and a start. `before-kill` reads a
session that is new to the server: played last before the kill, it leaves no time to write. `kill`
goes on with it. That session is as long as one of the day's, so that it fits in the memory that a
server has after the kill. The ideal reads of a next turn what is new in it.
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
    made_session,
)
from hearth.commands.bench.workloads.sessions import salt
from hearth.commands.replay.player import Row
from hearth.commands.replay.traces import Captured

RESTART, BEFORE_KILL, KILL = "restart", "before-kill", "kill"
TURNS: Final = 3  # before the kill
NOT_RESTARTED: Final = "nobody restarts a server by URL"
NOT_READ: Final = "nothing was read before the {0}: play the workload {1} too"


def next_turn(row: Captured) -> Captured:
    """Return the request that goes on with a chat: a made-up answer and a question more."""
    assert row.dialect == "chat", row.dialect
    said = {"role": "assistant", "content": filler(ANSWER_TOKENS, f"{RESTART} answer")}
    asked = {"role": "user", "content": filler(QUESTION_TOKENS, f"{RESTART} question")}
    messages = [*row.body["messages"], said, asked]
    return replace(row, body={**row.body, "messages": messages}, said="")


def session_to_kill(visit: Visit) -> list[Captured]:
    """Return the session that is read before the kill, and its turn that comes after it."""
    return made_session(KILL, 0, visit.scale.day_tokens, TURNS + 1, salt(visit, KILL))


async def run_restart(visit: Visit) -> Measured:
    asked = next_turn(linear_session(visit)[-1])
    return await _go_on(visit, asked, READ_ROWS, NOT_READ.format(RESTART, "answers"))


async def run_before_kill(visit: Visit) -> Measured:
    if visit.server.url:
        return Measured({}, errors=(NOT_RESTARTED,))
    async with measuring(visit) as taken:
        done = await ask(visit, session_to_kill(visit)[:TURNS], is_serial=True)
    visit.kept[BEFORE_KILL] = done
    return measured(done, taken.values())


async def run_kill(visit: Visit) -> Measured:
    asked = session_to_kill(visit)[TURNS]
    return await _go_on(visit, asked, BEFORE_KILL, NOT_READ.format(KILL, BEFORE_KILL))


async def _go_on(visit: Visit, asked: Captured, kept: str, not_read: str) -> Measured:
    """Ask one prompt more of a session; what of it was read before is under `kept`."""
    before = cast(Sequence[Row], visit.kept.get(kept, ()))
    if visit.server.url or not before or before[-1].tokens is None:
        return Measured({}, errors=(NOT_RESTARTED if visit.server.url else not_read,))
    async with measuring(visit) as taken:
        done = await ask(visit, [asked], is_serial=True)
    found = measured(done, taken.values(), before=before)
    return replace(found, values={**found.values, "start_s": visit.running.start_s})


WORKLOADS: Final = (
    Workload(
        RESTART,
        "The next turn of the linear session, after all other workloads of a fresh start, a clean "
        "stop and a start. A server that keeps few sessions may have lost this one before it was "
        "stopped: played with linear and answers alone, it shows the restart alone.",
        Start.RESTARTED,
        run_restart,
    ),
)
KILL_WORKLOADS: Final = (
    Workload(
        BEFORE_KILL,
        f"A session of {TURNS} turns, new to the server, just before it is killed.",
        Start.RESTARTED,
        run_before_kill,
    ),
    Workload(
        KILL,
        "The next turn of that session, after kill -9 and a start.",
        Start.KILLED,
        run_kill,
    ),
)
