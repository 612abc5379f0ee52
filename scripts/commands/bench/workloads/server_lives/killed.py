"""Kills a server by force shortly after it has read a session, and asks for its next turn.

`before-kill` reads a session that is new to the server: played last before the kill, it leaves no
time to write. `kill` goes on with it. The session is as long as one of the day's, so that it fits
in the memory that a server has after the kill.
"""

from typing import Final

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.ask import ask
from hearth.commands.bench.workloads.counted_tokens.counted import measured
from hearth.commands.bench.workloads.server_lives.made_sessions import (
    TURN_TOKENS,
    made_session,
)
from hearth.commands.bench.workloads.server_lives.restarted import NOT_READ, NOT_RESTARTED, go_on
from hearth.commands.bench.workloads.sessions import salt
from hearth.commands.replay.traces import Captured

BEFORE_KILL, KILL = "before-kill", "kill"
TURNS: Final = 3  # before the kill


def session_to_kill(visit: Visit) -> list[Captured]:
    """Return the session that is read before the kill, and its turn that comes after it."""
    return made_session(KILL, 0, visit.scale.day_tokens, TURNS + 1, salt(visit, KILL))


async def run_before_kill(visit: Visit) -> Measured:
    if visit.server.url:
        return Measured({}, errors=(NOT_RESTARTED,))
    async with measuring(visit) as taken:
        done = await ask(visit, session_to_kill(visit)[:TURNS], is_serial=True)
    visit.kept[BEFORE_KILL] = done
    return measured(done, taken.values())


async def run_kill(visit: Visit) -> Measured:
    asked = session_to_kill(visit)[TURNS]
    return await go_on(visit, asked, BEFORE_KILL, NOT_READ.format("kill", BEFORE_KILL))


WORKLOADS: Final = (
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
