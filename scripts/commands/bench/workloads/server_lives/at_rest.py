"""Watches a server that has just worked, for some seconds in which nobody asks it anything."""

import asyncio
from collections.abc import Mapping
from typing import Final

from hearth.commands.bench.measuring import measuring
from hearth.commands.bench.workload import Measured, Start, Visit, Workload

NAME: Final = "at-rest"
WATCH_S: Final = 5.0
# The wall time is ours, and all that is read is read in idle time.
TOLD: Final = ("read_tokens", "cpu_s", "memory_bytes", "written_bytes")


async def run(visit: Visit) -> Measured:
    if visit.server.url:
        return Measured({}, errors=("the processes of a server by URL are not watched",))
    async with measuring(visit) as taken:
        await asyncio.sleep(WATCH_S)
    return Measured(told(taken.values()))


def told(values: Mapping[str, float]) -> dict[str, float]:
    return {name: values[name] for name in TOLD if name in values}


WORKLOADS: Final = (
    Workload(
        NAME,
        f"{WATCH_S:.0f} seconds without a request, after the work of a fresh start.",
        Start.FRESH,
        run,
    ),
)
