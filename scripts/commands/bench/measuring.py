"""Measures what a server does while a workload runs, and after it until the server rests.

What is read in idle time, or for a client that has gone, is so charged to the workload that caused
it; so are its CPU seconds, its energy and what it writes. The wall time ends with the workload.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from hearth.commands.bench.energy import EnergyCounter, energy_counter
from hearth.commands.bench.process_measures import ProcessLedger, memory_bytes
from hearth.commands.bench.servers.server import Meter, Running
from hearth.commands.bench.workloads.workload import Visit

_LOOK_S: Final = 0.05  # between two looks at the meter
_SURVEY_S: Final = 1.0  # between two looks at the processes
_SURVEY_SHARE: Final = 50  # of the time that a look at the processes takes: 2 % at most
REST_S: Final = 0.4  # the meter stands still for so long when a server rests,
# or for half as long again as between two forwards before: a chunk of 2,048 tokens takes 9 s on a
# 27B model on a Mac, and the meter stands still meanwhile.
_REST_TIMES: Final = 1.5
REST_S_MAX: Final = 10.0
WAIT_S_MAX: Final = 60.0  # for a server that never rests


@dataclass(slots=True)
class Taken:
    """What was measured. Complete when the block has ended."""

    forwards: float | None = None  # None where the server has no meter
    is_rested: bool = False  # it stood still before the longest wait was over
    found: dict[str, float] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """Return the values by name of MEASURES; what cannot be told of this server is left out."""
        assert self.found, "the block has not ended"
        return dict(self.found)


@asynccontextmanager
async def measuring(visit: Visit) -> AsyncIterator[Taken]:
    """Measure the server of `visit` during the block and until it rests behind it."""
    taken = Taken()
    running = visit.running
    energy = energy_counter()
    meter, joules = running.meter(), energy.joules()
    watched = _Activity(running)
    async with _surveyed(running, energy) as survey:
        began = time.monotonic()
        async with watched.watching():
            yield taken
        wall_s, at_end = time.monotonic() - began, running.meter()
        taken.is_rested = await watched.rest()
        after = running.meter()
    taken.found = {"wall_s": wall_s, **survey.values()}
    if meter and at_end and after:
        taken.forwards = at_end.forwards - meter.forwards
        taken.found["read_tokens"] = after.read_tokens - meter.read_tokens
        taken.found["idle_tokens"] = after.read_tokens - at_end.read_tokens
    joules_after = energy.joules()
    if joules is not None and joules_after is not None:
        taken.found["energy_j"] = joules_after - joules


class _Activity:
    """Notes when the meter moved. Owner: the event loop."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._meter: Meter | None = running.meter()
        self._moved: float | None = None
        self._longest_s = 0.0  # between two moves

    def look(self) -> float:
        """Look at the meter, and return for how long it has stood still."""
        now, meter = time.monotonic(), self._running.meter()
        if meter != self._meter:
            if self._moved is not None:
                self._longest_s = max(self._longest_s, now - self._moved)
            self._meter, self._moved = meter, now
        return now - self._moved if self._moved is not None else REST_S_MAX

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        while self._running.is_metered:
            self.look()
            await asyncio.sleep(_LOOK_S)

    async def rest(self) -> bool:
        """Wait until the meter stands still; return whether it did."""
        ended = time.monotonic()
        if not self._running.is_metered:
            return True
        while (waited_s := time.monotonic() - ended) < WAIT_S_MAX:
            quiet_s = min(REST_S_MAX, max(REST_S, _REST_TIMES * self._longest_s))
            # What a server makes of the last request may begin a moment after its answer.
            if self.look() >= quiet_s and waited_s >= REST_S:
                return True
            await asyncio.sleep(_LOOK_S)
        return False


class _Survey:
    """Looks at the processes of a server in a thread, as that takes milliseconds. Owner: it."""

    def __init__(self, running: Running, energy: EnergyCounter) -> None:
        self._running = running
        self._energy = energy
        self._ledger = ProcessLedger(running.pids)
        self._memory = memory_bytes(running.pids())
        self._totals = self._ledger.look()

    def look(self) -> float:
        """Look once; return the seconds that it took."""
        began = time.monotonic()
        self._totals = self._ledger.look()
        self._memory = max(self._memory, memory_bytes(self._running.pids()))
        self._energy.joules()  # its counters wrap around
        return time.monotonic() - began

    def values(self) -> dict[str, float]:
        if not self._memory:  # no process can be seen: a server by URL
            return {}
        return {
            "cpu_s": self._totals.cpu_s,
            "written_bytes": float(max(0, self._totals.written_bytes)),
            "memory_bytes": float(self._memory),
        }


@asynccontextmanager
async def _surveyed(running: Running, energy: EnergyCounter) -> AsyncIterator[_Survey]:
    survey = await asyncio.to_thread(_Survey, running, energy)
    stop = asyncio.Event()
    task = asyncio.create_task(_survey_often(survey, stop))
    try:
        yield survey
    finally:
        stop.set()
        await task
    await asyncio.to_thread(survey.look)


async def _survey_often(survey: _Survey, stop: asyncio.Event) -> None:
    took_s = 0.0
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), max(_SURVEY_S, _SURVEY_SHARE * took_s))
            return
        took_s = await asyncio.to_thread(survey.look)
