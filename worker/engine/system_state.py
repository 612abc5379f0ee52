"""Asks the system what this process takes, how short memory is, and whether mains power is there.

MLX counts its own arrays; the system counts the process: Python's objects (sessions, tokens,
tokeniser), libraries, what malloc keeps, and what a driver holds for the arrays. How short memory
is macOS alone says.
"""

import ctypes
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Final

import mlx.core as mx

from hearth.shared.suspending_clock import awake_s

_RUSAGE_INFO_V2: Final = 2
_WORDS: Final = 64  # rusage_info_v2 is 20 words of 8 bytes; later kernels write no more into it
_FOOTPRINT_WORD: Final = 9  # after a UUID of two words: ri_phys_footprint
OVERHEAD_MAX: Final = 0.15
MEASURES_MAX: Final = 20  # two a second are made: 10 s
_STATM: Final = Path("/proc/self/statm")
_SUPPLIES: Final = Path("/sys/class/power_supply")
_UNLIMITED: Final = -2.0  # kIOPSTimeRemainingUnlimited: no battery is drawn on
_IOKIT: Final = "/System/Library/Frameworks/IOKit.framework/IOKit"
LOOK_S: Final = 30.0  # between two looks at the power source
_SYSCTL: Final = b"kern.memorystatus_vm_pressure_level"


def process_bytes() -> int:
    """Return what the system counts as this process's; 0 where it does not say. Any thread.

    On macOS that is `phys_footprint`, by which the system chooses what to end; on Linux the
    resident set. Takes microseconds.
    """
    if sys.platform == "darwin":
        # Source: proc_pid_rusage in libproc.h, struct rusage_info_v2 in sys/resource.h.
        words, ask = (ctypes.c_uint64 * _WORDS)(), ctypes.CDLL(None).proc_pid_rusage
        failed = ask(os.getpid(), _RUSAGE_INFO_V2, ctypes.byref(words))
        return 0 if failed else int(words[_FOOTPRINT_WORD])
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class MemoryUse:
    """Tells how much memory this worker takes: MLX's arrays, and what is beside them.

    MLX's count falls as soon as an array goes, the system's a while later. So the arrays are
    counted at each question, and what is beside them when `measure` is called, between forwards.
    Owner: the inference thread; others may read.
    """

    def __init__(
        self,
        process: Callable[[], int] = process_bytes,
        arrays: Callable[[], int] = mx.get_active_memory,
        freed: Callable[[], int] = mx.get_cache_memory,
    ) -> None:
        """`freed` tells what MLX holds for arrays to come, which is no use of memory."""
        self._process = process
        self._arrays = arrays
        self._freed = freed
        # What has just gone is in the system's count for a while: the smallest of the last counts.
        # Kept for everybody: bytes in use
        self._measures: deque[int] = deque(maxlen=MEASURES_MAX)
        self.beside_bytes = 0
        self.process_bytes = 0
        self.measure()

    def measure(self) -> None:
        """Ask the system what the process takes. A GPU's own memory is not in its answer."""
        self.process_bytes = self._process()
        arrays = self._arrays() + self._freed()
        self._measures.append(max(0, self.process_bytes - arrays))
        self.beside_bytes = min(self._measures)

    @property
    def overhead(self) -> float:
        """What the system counts for a byte of arrays beyond it: 0 to OVERHEAD_MAX.

        A driver may hold more than the arrays that it was asked for, and will for those to come.
        Libraries and Python's objects are in this too, which grow with nothing: hence the maximum.
        """
        return min(OVERHEAD_MAX, self.beside_bytes / max(1, self._arrays()))

    def bytes_used(self) -> int:
        """Return what counts against the limit now."""
        return self._arrays() + self.beside_bytes


class Pressure(IntEnum):
    """The levels of macOS: at WARNING programs should give back what they can, at CRITICAL it ends
    some."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


def system_pressure() -> Pressure:
    """Return the system's level now. Any thread; takes microseconds.

    Source: dispatch/source.h, DISPATCH_MEMORYPRESSURE_*; the sysctl has the same values.
    """
    if sys.platform != "darwin":
        return Pressure.NORMAL
    level = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(level))
    ask = ctypes.CDLL(None).sysctlbyname
    failed = ask(_SYSCTL, ctypes.byref(level), ctypes.byref(size), None, 0)
    known = {each.value for each in Pressure}
    return Pressure(level.value) if not failed and level.value in known else Pressure.NORMAL


class PowerSource:
    """Remembers what the last look found. Owner: the inference thread, which never waits for one.

    What the system does not say counts as mains, and so does all before the first look's end.
    """

    def __init__(
        self, read: Callable[[], bool] | None = None, clock: Callable[[], float] = awake_s
    ) -> None:
        """`read` looks, in a thread of its own: a battery's controller may take its time."""
        self._read = read if read is not None else on_mains
        self._clock = clock
        self._look_at = 0.0
        self._is_on_mains = True

    def is_on_mains(self) -> bool:
        """Return what is known, and have another look begun where that is old. Never blocks."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            threading.Thread(target=self._look, name="power source", daemon=True).start()
        return self._is_on_mains

    def _look(self) -> None:
        self._is_on_mains = self._read()


def on_mains() -> bool:
    """Return whether the machine runs on mains power now. Any thread; may block for some ms."""
    try:
        if sys.platform != "darwin":
            return linux_on_mains(_SUPPLIES)
        # Source: IOKit/ps/IOPowerSources.h, since macOS 10.7. -1 is a battery just taken into use.
        estimate = ctypes.CDLL(_IOKIT).IOPSGetTimeRemainingEstimate
        estimate.restype = ctypes.c_double
        return bool(estimate() == _UNLIMITED)
    except (OSError, AttributeError):  # no such framework, or no such function in it
        return True


def linux_on_mains(supplies: Path) -> bool:
    """Return whether no battery of the machine is discharging, or a supply is plugged in.

    Source: Documentation/ABI/testing/sysfs-class-power. A mouse's battery has the scope Device.
    """
    if not supplies.is_dir():
        return True
    found = [each for each in supplies.iterdir() if _text(each / "scope") != "Device"]
    if any(_text(each / "online") not in ("", "0") for each in found):
        return True
    return not any(_text(each / "status") == "Discharging" for each in found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # this supply does not tell it
        return ""
