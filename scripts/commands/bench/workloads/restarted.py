"""Asks a server that was started again what it has read before: after a clean stop, after kill -9.

`restart` asks the last prompt of the linear session again, which the fresh server has read.
`before-kill` reads a session that is new to the server, shortly before it is killed; `kill` asks
its last prompt again. That session is as long as one of the day's, so that it fits in the memory
that a server has after the kill. Of each prompt that is asked again one token has to be read.
"""

from collections.abc import Sequence
from typing import Final

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workloads.answers import LINEAR_READ, linear_session
from hearth.commands.bench.workloads.ask import ask, errors_of, request_values
from hearth.commands.bench.workloads.made_sessions import TURN_TOKENS, word_session
from hearth.commands.bench.workloads.sessions import salt
from hearth.commands.bench.workloads.workload import Measured, Start, Visit, Workload
from hearth.commands.replay.player import Row
from hearth.commands.replay.traces import Captured

RESTART, BEFORE_KILL, KILL = "restart", "before-kill", "kill"
TURNS: Final = 3
BY_URL: Final = "nobody restarts a server by URL"
NOT_READ: Final = "nothing was read before the {0}: run the workload {1} too"


def session_to_kill(visit: Visit) -> list[Captured]:
    return word_session(KILL, 0, visit.scale.day_tokens, TURNS, salt(visit, KILL))


async def run_restart(visit: Visit) -> Measured:
    if visit.server.url or not visit.kept.get(LINEAR_READ):
        why = BY_URL if visit.server.url else NOT_READ.format("restart", "linear or answers")
        return Measured({}, errors=(why,))
    return await _asked_again(visit, linear_session(visit)[-1:])


async def run_before_kill(visit: Visit) -> Measured:
    if visit.server.url:
        return Measured({}, errors=(BY_URL,))
    async with measuring(visit) as taken:
        done = await ask(visit, session_to_kill(visit), is_serial=True)
    visit.kept[BEFORE_KILL] = done[-1].tokens is not None
    return Measured({**request_values(done), **taken.values()}, errors=errors_of(done))


async def run_kill(visit: Visit) -> Measured:
    if not visit.kept.get(BEFORE_KILL):
        why = BY_URL if visit.server.url else NOT_READ.format("kill", BEFORE_KILL)
        return Measured({}, errors=(why,))
    return await _asked_again(visit, session_to_kill(visit)[-1:])


async def _asked_again(visit: Visit, rows: Sequence[Captured]) -> Measured:
    async with measuring(visit) as taken:
        done = await ask(visit, rows, is_serial=True)
    values = {**request_values(done), **taken.values(), **ideal_again(done)}
    return Measured(values | start_of(visit), errors=errors_of(done))


def ideal_again(rows: Sequence[Row]) -> dict[str, float]:
    """Return a token for each answered prompt, where ids are told: the rest was read before."""
    told = [row for row in rows if row.tokens is not None]
    if not told or any(row.ids is None for row in told):
        return {}
    return {"ideal_tokens": float(len(told))}


def start_of(visit: Visit) -> dict[str, float]:
    """Return how long the server took to be ready, where that is known."""
    start_s = getattr(visit.running, "start_s", None)
    return {} if start_s is None else {"start_s": float(start_s)}


WORKLOADS: Final = (
    Workload(
        RESTART,
        "The linear session's last prompt once more, after a clean stop and start.",
        Start.RESTARTED,
        run_restart,
        read_tokens=lambda _: 1,
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
        "That session's last prompt once more, after kill -9 and a start.",
        Start.KILLED,
        run_kill,
        read_tokens=lambda _: 1,
    ),
)
