"""Plays sub-agents that work at once, overlapping as they did when they were captured."""

from typing import Final

from hearth.commands.bench.workload import Measured, Scale, Start, Visit, Workload
from hearth.commands.bench.workloads.counted_tokens.counted import play_counted
from hearth.commands.bench.workloads.sessions import session

FAN_OUT: Final = "opencode-fanout-slow"
FORK: Final = "claude-code-session-9"


async def _run_fan_out(visit: Visit) -> Measured:
    return await play_counted(visit, [session(FAN_OUT, visit, "sub-agents")])


async def _run_fork(visit: Visit) -> Measured:
    return await play_counted(visit, [session(FORK, visit, "forked-agent")])


def _fan_out_tokens(scale: Scale) -> int:
    return {"quick": 3_000, "full": 6_500}.get(scale.name, 36_000)


def _fork_tokens(scale: Scale) -> int:
    return {"quick": 7_500, "full": 10_200}.get(scale.name, 52_000)


WORKLOADS: Final = (
    Workload(
        "sub-agents",
        "An agent of opencode sends two sub-agents at once; they overlap as captured.",
        Start.FRESH,
        _run_fan_out,
        read_tokens=_fan_out_tokens,
    ),
    Workload(
        "forked-agent",
        "Claude Code forks a sub-agent that shares its parent's whole prompt; both go on.",
        Start.FRESH,
        _run_fork,
        is_quick=False,
        read_tokens=_fork_tokens,
    ),
)
