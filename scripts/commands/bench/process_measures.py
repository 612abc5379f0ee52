"""Counts what all processes of a server take of the machine: CPU seconds, memory, bytes written.

A process that ended since the last look is in its parent's count of waited-for children; what no
parent waited for keeps its last value. What starts and ends between two looks is counted where its
parent waited for it. The macOS side follows the system's headers and was never run on a Mac.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil

_RUSAGE_INFO_V2: Final = 2
_WORDS: Final = 64  # rusage_info_v2 is 20 words of 8 bytes; later kernels write no more into it
# rusage_info_v2 in sys/resource.h, in words of 8 bytes behind a UUID of two.
_USER, _SYSTEM, _FOOTPRINT, _CHILD_USER, _CHILD_SYSTEM, _WRITTEN = 2, 3, 9, 12, 13, 19
_TICK_S: Final = 0.02  # two ticks of Linux: what rounding may hide of an ended process


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """What one process has taken since it began."""

    started: float  # tells a process from a later one of its number
    parent: int
    cpu_s: float
    waited_cpu_s: float  # of children that ended and were waited for, theirs included
    written_bytes: int | None  # to disk; None where the system does not say, as of a zombie
    adds_written: bool  # whether `written_bytes` has those of waited-for children


@dataclass(frozen=True, slots=True)
class ProcessTotals:
    """What all processes of a server took since the first look."""

    cpu_s: float
    written_bytes: int


Read = Callable[[int], ProcessReading | None]


class ProcessLedger:
    """Adds up what a changing set of processes took. Owner: one caller at a time."""

    def __init__(self, pids: Callable[[], Iterable[int]], read: "Read | None" = None) -> None:
        self._pids = pids
        self._read = read or read_process
        self._last: dict[int, ProcessReading] = {}
        # What ended and is in no parent's count: for ever, or until the parent waits for it.
        self._ended_cpu_s = 0.0
        self._owed_cpu_s: dict[int, float] = {}
        self._ended_bytes = 0
        self._first = ProcessTotals(0.0, 0)
        self._first = self.look()

    def look(self) -> ProcessTotals:
        """Read all processes, and return what was taken since the first look."""
        now = {pid: found for pid in self._pids() if (found := self._read_on(pid)) is not None}
        lost = self._lost(now)
        for pid in {*lost, *self._owed_cpu_s}:
            self._settle(pid, lost.get(pid, []), now.get(pid))
        self._last = now
        cpu_s = self._ended_cpu_s + sum(self._owed_cpu_s.values())
        cpu_s += sum(each.cpu_s + each.waited_cpu_s for each in now.values())
        written = self._ended_bytes + sum(each.written_bytes or 0 for each in now.values())
        return ProcessTotals(cpu_s - self._first.cpu_s, written - self._first.written_bytes)

    def _read_on(self, pid: int) -> ProcessReading | None:
        found, before = self._read(pid), self._last.get(pid)
        if found is None or before is None or found.written_bytes is not None:
            return found
        return replace(found, written_bytes=before.written_bytes)

    def _lost(self, now: Mapping[int, ProcessReading]) -> dict[int, list[ProcessReading]]:
        """Return what ended since the last look, by the nearest ancestor that lives; 0 for none."""
        gone = {
            pid: each
            for pid, each in self._last.items()
            if pid not in now or now[pid].started != each.started
        }
        lost: dict[int, list[ProcessReading]] = {}
        for each in gone.values():
            parent, passed = each.parent, set[int]()
            while parent in gone and parent not in passed:
                passed.add(parent)
                parent = gone[parent].parent
            is_living = parent in now and parent in self._last and parent not in gone
            lost.setdefault(parent if is_living else 0, []).append(each)
        return lost

    def _settle(
        self, pid: int, ended: Sequence[ProcessReading], parent: ProcessReading | None
    ) -> None:
        """Keep of what ended below the process `pid` what its count has not taken over."""
        before = self._last.get(pid)
        cpu_s = self._owed_cpu_s.pop(pid, 0.0)
        cpu_s += sum(each.cpu_s + each.waited_cpu_s for each in ended)
        if parent is None or before is None or parent.started != before.started:
            self._ended_cpu_s += cpu_s
            is_waited = False
        else:
            cpu_s -= parent.waited_cpu_s - before.waited_cpu_s
            is_waited = cpu_s <= _TICK_S * len(ended)
            if cpu_s > 0:
                self._owed_cpu_s[pid] = cpu_s
        if not (is_waited and parent and parent.adds_written):
            self._ended_bytes += sum(each.written_bytes or 0 for each in ended)


# ---------------------------------------------------------------- one process


def read_process(pid: int) -> ProcessReading | None:
    """Return what the process `pid` has taken; None when it is gone or another user's."""
    return _read_mac(pid) if sys.platform == "darwin" else _read_linux(pid)


def memory_bytes(pids: Iterable[int]) -> int:
    """Return the memory of all `pids`: footprint on macOS, on Linux shared pages by halves (PSS).

    On Linux it takes the longer the more memory a process has, some milliseconds a GB.
    """
    one = _footprint if sys.platform == "darwin" else _proportional
    return sum(one(pid) for pid in pids)


def parsed_stat(text: str, ticks: int) -> tuple[float, int, float, float]:
    """Return start, parent, CPU seconds and those of waited-for children from /proc/PID/stat."""
    # The program's name may hold blanks and brackets; the last bracket ends it.
    fields = text.rpartition(")")[2].split()
    user, system, child_user, child_system = (int(each) / ticks for each in fields[11:15])
    return int(fields[19]) / ticks, int(fields[1]), user + system, child_user + child_system


def parsed_io(text: str) -> int:
    """Return the bytes written to disk from /proc/PID/io, less those that were deleted before."""
    told = dict(line.split(": ") for line in text.splitlines())
    return int(told["write_bytes"]) - int(told["cancelled_write_bytes"])


def parsed_rollup(text: str) -> int:
    """Return the proportional set size from /proc/PID/smaps_rollup, in bytes."""
    lines = (line.split() for line in text.splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == "Pss:")


def _read_linux(pid: int) -> ProcessReading | None:
    place = Path("/proc", str(pid))
    try:
        stat = (place / "stat").read_text(errors="replace")
        started, parent, cpu_s, waited_s = parsed_stat(stat, os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return None
    try:
        written: int | None = parsed_io((place / "io").read_text())
    except (OSError, ValueError, KeyError):  # a zombie's is closed
        written = None
    return ProcessReading(started, parent, cpu_s, waited_s, written, adds_written=True)


def _proportional(pid: int) -> int:
    place = Path("/proc", str(pid))
    try:
        return parsed_rollup((place / "smaps_rollup").read_text())
    except (OSError, ValueError, StopIteration, IndexError):
        return _resident(pid)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _read_mac(pid: int) -> ProcessReading | None:
    words = _rusage(pid)
    if words is None:
        return None
    try:
        process = psutil.Process(pid)
        started, parent = process.create_time(), process.ppid()
    except psutil.Error:
        return None
    return reading_of(words, _tick_s(), started, parent)


def reading_of(
    words: Mapping[int, int] | list[int], tick_s: float, started: float, parent: int
) -> ProcessReading:
    """Return what the words of rusage_info_v2 say; times there are in ticks of the machine."""
    return ProcessReading(
        started=started,
        parent=parent,
        cpu_s=(words[_USER] + words[_SYSTEM]) * tick_s,
        waited_cpu_s=(words[_CHILD_USER] + words[_CHILD_SYSTEM]) * tick_s,
        written_bytes=words[_WRITTEN],
        adds_written=False,
    )


def _footprint(pid: int) -> int:
    words = _rusage(pid)
    return 0 if words is None else words[_FOOTPRINT]


def _rusage(pid: int) -> list[int] | None:
    """Source: proc_pid_rusage in libproc.h; None when the process is gone or another user's."""
    words = (ctypes.c_uint64 * _WORDS)()
    failed = ctypes.CDLL(None).proc_pid_rusage(pid, _RUSAGE_INFO_V2, ctypes.byref(words))
    return None if failed else list(words)


def _tick_s() -> float:
    """Source: mach_timebase_info in mach/mach_time.h; on Apple Silicon a tick is 125/3 ns."""
    fraction = (ctypes.c_uint32 * 2)()
    ctypes.CDLL(None).mach_timebase_info(ctypes.byref(fraction))
    return float(fraction[0] / max(1, fraction[1]) / 1e9)
