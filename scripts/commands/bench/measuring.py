"""Measures what a server does while a workload runs, and after it until the server rests.

What is read in idle time, or for a client that has gone, is so charged to the workload that caused
it; so are its CPU seconds and what it writes. The wall time ends with the workload, and memory is
what the processes have when the server rests.
"""

import asyncio
import contextlib
import ctypes
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import psutil

from hearth.commands.bench.server import Meter, Running
from hearth.commands.bench.workload import Visit

_LOOK_S: Final = 0.05  # between two looks at the meter
REST_S: Final = 0.4  # the meter stands still for so long when a server rests,
# or for half as long again as between two forwards before: a chunk of 2,048 tokens takes 9 s on a
# 27B model on a Mac, and the meter stands still meanwhile.
_REST_TIMES: Final = 1.5
REST_S_MAX: Final = 10.0
WAIT_S_MAX: Final = 60.0  # for a server that never rests
# rusage_info_v2 in sys/resource.h, in words of 8 bytes; later kernels write no more than 64.
_RUSAGE_INFO_V2, _WORDS, _FOOTPRINT, _WRITTEN = 2, 64, 9, 19


@dataclass(slots=True)
class Taken:
    """What was measured. Complete when the block has ended."""

    activity: "Activity"
    forwards: float | None = None  # None where the server has no meter
    found: dict[str, float] = field(default_factory=dict)

    async def idle(self, wait_s: float) -> None:
        """Sleep so long within the block: the server's standstill meanwhile is no chunk's."""
        await asyncio.sleep(wait_s)
        self.activity.forget()

    def values(self) -> dict[str, float]:
        """Return the values by name of MEASURES; what cannot be told of this server is left out."""
        assert self.found, "the block has not ended"
        return dict(self.found)


@asynccontextmanager
async def measuring(visit: Visit) -> AsyncIterator[Taken]:
    """Measure the server of `visit` during the block and until it rests behind it."""
    running = visit.running
    meter = running.meter()
    activity = Activity(meter)
    taken = Taken(activity)
    cpu_s, written, _ = _taken(running.pids())
    watch = asyncio.create_task(_watch(running, activity))
    try:
        began = time.monotonic()
        yield taken
        wall_s, at_end = time.monotonic() - began, running.meter()
        await _rest(running, activity)
        after = running.meter()
    finally:
        watch.cancel()
        await asyncio.wait((watch,))
    taken.found = {"wall_s": wall_s}
    if pids := running.pids():  # by URL none is seen
        cpu_s_after, written_after, memory = _taken(pids)
        taken.found["cpu_s"] = max(0.0, cpu_s_after - cpu_s)
        taken.found["written_bytes"] = float(max(0, written_after - written))
        taken.found["memory_bytes"] = float(memory)
    if meter and at_end and after:
        taken.forwards = at_end.forwards - meter.forwards
        taken.found["read_tokens"] = after.read_tokens - meter.read_tokens
        taken.found["idle_tokens"] = after.read_tokens - at_end.read_tokens


# ---------------------------------------------------------------- rest


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


async def _watch(running: Running, activity: Activity) -> None:
    while running.is_metered:
        activity.look(time.monotonic(), running.meter())
        await asyncio.sleep(_LOOK_S)


async def _rest(running: Running, activity: Activity) -> None:
    """Wait until the server rests, which is watched meanwhile; WAIT_S_MAX at most."""
    ended = time.monotonic()
    while running.is_metered and not activity.is_at_rest(time.monotonic(), ended):
        if time.monotonic() - ended >= WAIT_S_MAX:
            return
        await asyncio.sleep(_LOOK_S)


# ---------------------------------------------------------------- processes


def _taken(pids: Sequence[int]) -> tuple[float, int, int]:
    """Return CPU seconds and bytes written of processes so far, and their memory.

    Memory is their footprint on macOS (never run on a Mac), on Linux shared pages by halves (PSS).
    Takes milliseconds, some more for each GB on Linux. Source: proc_pid_rusage in libproc.h.
    """
    cpu_s, written, memory = 0.0, 0, 0
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            cpu_s += sum(process.cpu_times()[:4])  # of ended children, too
            if sys.platform == "darwin":
                words = (ctypes.c_uint64 * _WORDS)()
                ctypes.CDLL(None).proc_pid_rusage(pid, _RUSAGE_INFO_V2, ctypes.byref(words))
                written += words[_WRITTEN]
                memory += words[_FOOTPRINT]
            else:
                written += process.io_counters().write_bytes
                memory += process.memory_full_info().pss
    return cpu_s, written, memory
