"""Plays a session whose history is edited and forked, and which then goes on as it was."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hearth.commands.bench.workload import Measured, Start, Visit, Workload
from hearth.commands.bench.workloads.counted_tokens.captured_sessions import CHAT
from hearth.commands.bench.workloads.counted_tokens.counted import play_counted
from hearth.commands.bench.workloads.sessions import session
from hearth.commands.replay.traces import Captured

NAME: Final = "forks-and-edits"
TURNS: Final = 4  # as captured, before the first edit
FORKS: Final = 3
CORRECTED: Final = "Corrected: "


def forks_and_edits(rows: Sequence[Captured]) -> list[Captured]:
    """Return the requests of somebody who changes his mind; `rows` are chat completions.

    The first of `rows` is the client's side call for a title, which is left out.
    """
    turns = rows[1 : 1 + TURNS]
    last, question = turns[-1], turns[0]
    count = len(last.body["messages"])
    middle = next(
        at
        for at in range(count // 2, count)
        if last.body["messages"][at]["role"] == "tool"  # what was read: a file that has changed
    )
    return [
        *turns,
        edited(last, count - 1),
        edited(last, middle),
        *(forked(turns[TURNS // 2], number) for number in range(FORKS)),
        edited(question, len(question.body["messages"]) - 1),
        rows[1 + TURNS],
    ]


def edited(row: Captured, at: int) -> Captured:
    """Return a request whose message `at` begins otherwise."""
    body = copy.deepcopy(row.body)
    body["messages"][at]["content"] = CORRECTED + body["messages"][at]["content"]
    return replace(row, body=body)


def forked(row: Captured, number: int) -> Captured:
    """Return a request that asks something else behind the history of `row`."""
    asked = {"role": "user", "content": f"{number + 1} Stop here. What did you find so far?"}
    return replace(row, body={**row.body, "messages": [*row.body["messages"], asked]})


async def _run(visit: Visit) -> Measured:
    rows = forks_and_edits(session(CHAT, visit, NAME))
    return await play_counted(visit, [rows], is_serial=True)


WORKLOADS: Final = (
    Workload(
        NAME,
        "A history is edited at its end, in its middle and at its question, forked three times, "
        "and goes on as it was.",
        Start.FRESH,
        _run,
    ),
)
