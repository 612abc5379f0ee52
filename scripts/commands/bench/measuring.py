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
from hearth.commands.bench.server import Meter, Running
from hearth.commands.bench.workload import Visit

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
    activity: "Activity | None" = None

    async def idle(self, wait_s: float) -> None:
        """Sleep so long within the block: the server's standstill meanwhile is no chunk's."""
        await asyncio.sleep(wait_s)
        if self.activity is not None:
            self.activity.forget()

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
    async with _surveyed(running, energy) as survey, _watched(running) as activity:
        taken.activity = activity
        began = time.monotonic()
        yield taken
        wall_s, at_end = time.monotonic() - began, running.meter()
        taken.is_rested = await _rest(running, activity)
        after = running.meter()
    taken.found = {"wall_s": wall_s, **survey.values()}
    if meter and at_end and after:
        taken.forwards = at_end.forwards - meter.forwards
        taken.found["read_tokens"] = after.read_tokens - meter.read_tokens
        taken.found["idle_tokens"] = after.read_tokens - at_end.read_tokens
    joules_after = energy.joules()
    if joules is not None and joules_after is not None:
        taken.found["energy_j"] = joules_after - joules


class Activity:
    """Knows from looks at a meter when its server has come to rest. Owner: the event loop."""

    def __init__(self, meter: Meter | None) -> None:
        self._meter = meter
        self._moved: float | None = None
        self._longest_s = 0.0  # between two moves

    def look(self, now: float, meter: Meter | None) -> None:
        """Note what the meter shows at the time `now`, in seconds."""
        if meter == self._meter:
            return
        if self._moved is not None:
            self._longest_s = max(self._longest_s, now - self._moved)
        self._meter, self._moved = meter, now

    def forget(self) -> None:
        """Take the next move as the first one."""
        self._moved = None

    def is_at_rest(self, now: float, ended: float) -> bool:
        """Return whether nothing more is to be expected of requests that ended at `ended`."""
        quiet_s = min(REST_S_MAX, max(REST_S, _REST_TIMES * self._longest_s))
        is_still = self._moved is None or now - self._moved >= quiet_s
        # What a server makes of the last request may begin a moment after its answer.
        return is_still and now - ended >= REST_S


@asynccontextmanager
async def _watched(running: Running) -> AsyncIterator[Activity]:
    activity = Activity(running.meter())
    task = asyncio.create_task(_watch(running, activity))
    try:
        yield activity
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _watch(running: Running, activity: Activity) -> None:
    while running.is_metered:
        activity.look(time.monotonic(), running.meter())
        await asyncio.sleep(_LOOK_S)


async def _rest(running: Running, activity: Activity) -> bool:
    """Wait until the server rests, which is watched meanwhile; return whether it did."""
    ended = time.monotonic()
    while running.is_metered and not activity.is_at_rest(time.monotonic(), ended):
        if time.monotonic() - ended >= WAIT_S_MAX:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


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
