"""Sends requests of every kind to its own server for long, and watches what grows by them.

At the end of each round, when nothing runs, resident memory, open files and threads of each process
are taken, and what the worker's stores say that they hold. MLX's arrays, and the answers that are
drafted from, are taken off the worker's memory: they have their budgets, and come and go with what
is asked. Nothing may rise over the second half, in which the stores are at their bounds from some
10,000 requests on, and KV in RAM and on disk never be above its budget.
"""

import argparse
import asyncio
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from scripts.faults.load import loaded_server
from scripts.faults.own_server import MB, Held, drafts_line

ROUNDS: Final = 20
# Over the second half. Of threads the event loop's pool starts its six at need, and AnyIO's leave
# after 10 s without work.
GROWTH_MAX: Final = {"rss": 0.01, "files": 2.0, "threads": 5.0}  # of memory, as a share


@dataclass(frozen=True, slots=True)
class Round:
    """What was held at the end of a round, in bytes but for files and threads."""

    requests: int  # until then
    held: list[Held]  # the worker's memory: beside arrays and what it drafts from
    kv: int
    kv_budget: int
    disk: int
    disk_budget: int


def round_of(requests: int, held: Sequence[Held], row: dict[str, Any]) -> Round:
    """Return what `held` and the worker's row of `/v1/cache` tell."""
    arrays = row["memory_bytes"] - row["beside_arrays_bytes"] + row["speculation"]["bytes"]
    beside = [replace(each, rss=each.rss - arrays) for each in held[1:]]
    disk = row["disk"]["directory_bytes_used"] or 0, row["disk"]["bytes_max"]
    return Round(requests, [*held[:1], *beside], row["bytes"], row["budget_bytes"], *disk)


def growth_of(requests: Sequence[int], values: Sequence[float]) -> float:
    """Return by how much a figure grows over the second half, as a straight line has it."""
    half = len(values) // 2
    line = statistics.linear_regression(requests[half:], values[half:])
    return line.slope * (requests[-1] - requests[half])


def misses(rounds: Sequence[Round]) -> Iterator[str]:
    """Yield what does not hold, as text."""
    requests, roles = [each.requests for each in rounds], [held.role for held in rounds[0].held]
    for each in rounds:
        if each.kv > each.kv_budget or each.disk > each.disk_budget:
            yield f"KV is above its budget after {each.requests:,} requests: {each}"
    if any([held.role for held in each.held] != roles for each in rounds):
        yield "a process was not there all the time"
        return
    for number, role in enumerate(roles):
        for name, most in GROWTH_MAX.items():
            values = [getattr(each.held[number], name) for each in rounds]
            grown = growth_of(requests, values) / (values[len(values) // 2] if name == "rss" else 1)
            told = f"{grown:+.2%}" if name == "rss" else f"{grown:+.1f}"
            print(f"{role}: {name} {values[len(values) // 2]:,} -> {values[-1]:,}, {told}")
            if grown > most:
                yield f"{role}: {name} grew by {told} in the second half"


async def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Play it; return what was seen, with the misses.

    Raises:
        ServerError: the server does not start.
    """
    # In RAM it is less than what is asked takes: KV is evicted all the time.
    budgets, rounds = {"CACHE_RAM_BUDGET_MB": "8", "MAX_KV_SIZE_GB": "1"}, list[Round]()
    async with loaded_server(options.seed, budgets) as (server, load):

        async def be_client(aim: float) -> None:
            while load.ledger.begun < aim:
                await load.send(load.draw())

        for number in range(1, ROUNDS + 1):
            aim = options.requests * number / ROUNDS
            await asyncio.gather(*(be_client(aim) for _ in range(16)))
            await asyncio.sleep(1.5)  # until what the round's connections held is given back
            (row,) = (await server.told("/v1/cache"))["workers"]
            rounds.append(round_of(load.ledger.ended, server.held(), row))
            print(
                f"{load.ledger.ended:>7,} requests:",
                *(f"{each.role} {each.rss / MB:.1f} MB" for each in rounds[-1].held),
                flush=True,
            )
        print(drafts_line([row]))
        load.ledger.misses.update(misses(rounds))
    return load.ledger.told() | {"rounds": [asdict(each) for each in rounds]}
