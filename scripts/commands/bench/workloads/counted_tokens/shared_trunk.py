"""Plays eight agents that begin at once on one trunk, each with a task of its own."""

from typing import Final

from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.counted_tokens.counted import play_counted
from hearth.commands.bench.workloads.filler import filler
from hearth.commands.bench.workloads.sessions import salt
from hearth.commands.replay.traces import CHAT_PATH, Body, Captured

NAME: Final = "shared-trunk"
AGENTS: Final = 8
TURNS: Final = 2
TASK_TOKENS: Final = 100  # of each question, and of each answer that stands in the history
TURN_S: Final = 1.0  # of the made capture: a turn waits for the one before


def agents(trunk_tokens: int, salt: str) -> list[list[Captured]]:
    """Return each agent's session: the same system prompt, then its own task and next turn."""
    trunk = {"role": "system", "content": salt + filler(trunk_tokens, "trunk")}
    return [[_turn(trunk, agent, turn) for turn in range(TURNS)] for agent in range(AGENTS)]


def _turn(trunk: Body, agent: int, turn: int) -> Captured:
    messages = [trunk]
    for number in range(turn + 1):
        if number:
            said = filler(TASK_TOKENS, f"answer {agent} {number}")
            messages.append({"role": "assistant", "content": said})
        asked = f"Task {agent}, part {number}. " + filler(TASK_TOKENS, f"task {agent} {number}")
        messages.append({"role": "user", "content": asked})
    began_s = turn * TURN_S
    body: Body = {"messages": messages}
    return Captured(
        f"{NAME} {agent}", "chat", CHAT_PATH, {}, body, "", began_s, began_s + TURN_S / 2
    )


async def _run(visit: Visit) -> Measured:
    return await play_counted(visit, agents(visit.scale.trunk_tokens, salt(visit, NAME)))


WORKLOADS: Final = (
    Workload(
        NAME,
        "Eight agents begin at once on one system prompt, with different tasks, two turns each.",
        Start.FRESH,
        _run,
    ),
)
