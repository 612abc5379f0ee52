"""Reads this process's memory use, the system's memory pressure, and the power source.

MLX counts its own arrays. The system counts the whole process: Python's objects (sessions, tokens,
tokeniser), libraries, malloc's free blocks, and a driver's memory for the arrays. Only macOS
reports memory pressure.
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
_WORDS: Final = 64  # rusage_info_v2 has 20 words of 8 bytes; the rest is a margin
_FOOTPRINT_WORD: Final = 9  # ri_phys_footprint
OVERHEAD_MAX: Final = 0.15
MEASURES_MAX: Final = 20  # the last 10 s, at two measures per second
_STATM: Final = Path("/proc/self/statm")
_SUPPLIES: Final = Path("/sys/class/power_supply")
_UNLIMITED: Final = -2.0  # kIOPSTimeRemainingUnlimited: on mains power
_IOKIT: Final = "/System/Library/Frameworks/IOKit.framework/IOKit"
LOOK_S: Final = 30.0  # time between two reads of the power source
_SYSCTL: Final = b"kern.memorystatus_vm_pressure_level"


def process_bytes() -> int:
    """Return the bytes that the system counts for this process; 0 if unknown. Any thread.

    On macOS that is `phys_footprint`, by which the system chooses processes to kill. On Linux it is
    the resident set without pages of files, which the system drops when memory is short: libraries,
    and weights that are read by row. Takes microseconds.
    """
    if sys.platform == "darwin":
        # Source: proc_pid_rusage in libproc.h, struct rusage_info_v2 in sys/resource.h.
        words, rusage = (ctypes.c_uint64 * _WORDS)(), ctypes.CDLL(None).proc_pid_rusage
        failed = rusage(os.getpid(), _RUSAGE_INFO_V2, ctypes.byref(words))
        return 0 if failed else int(words[_FOOTPRINT_WORD])
    try:
        _, resident, of_files, *_ = map(int, _STATM.read_text().split())
        return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class MemoryUse:
    """Measures how much memory this worker takes: MLX's arrays, and everything else.

    MLX's count falls as soon as an array is freed, the system's count some time later. So the
    arrays are counted at each call, and the rest only in `measure`, between forwards.
    Owner: the inference thread; other threads may read.
    """

    def __init__(
        self,
        process: Callable[[], int] = process_bytes,
        arrays: Callable[[], int] = mx.get_active_memory,
        freed: Callable[[], int] = mx.get_cache_memory,
    ) -> None:
        """`freed` returns the bytes that MLX keeps for new arrays. These do not count as used."""
        self._process = process
        self._arrays = arrays
        self._freed = freed
        # The system's count falls late, so the smallest of the last counts is taken.
        # Kept for everybody: bytes in use
        self._measures: deque[int] = deque(maxlen=MEASURES_MAX)
        self.beside_bytes = 0
        self.process_bytes = 0
        self.measure()

    def measure(self) -> None:
        """Read the process's memory from the system. A GPU's own memory is not in it."""
        self.process_bytes = self._process()
        arrays = self._arrays() + self._freed()
        self._measures.append(max(0, self.process_bytes - arrays))
        self.beside_bytes = min(self._measures)

    @property
    def overhead(self) -> float:
        """The further bytes that the system counts for each byte of arrays: 0 to OVERHEAD_MAX.

        A driver may take more memory than the arrays have, now and for new arrays. Libraries and
        Python's objects are counted too, though they do not grow with arrays: hence the maximum.
        """
        return min(OVERHEAD_MAX, self.beside_bytes / max(1, self._arrays()))

    def bytes_used(self) -> int:
        """Return the bytes that count against the limit now."""
        return self._arrays() + self.beside_bytes


class Pressure(IntEnum):
    """The memory pressure of macOS.

    At WARNING programs should free memory. At CRITICAL the system kills processes.
    """

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4


def system_pressure() -> Pressure:
    """Return the system's memory pressure now. Any thread; takes microseconds.

    Source: dispatch/source.h, DISPATCH_MEMORYPRESSURE_*; the sysctl has the same values.
    """
    if sys.platform != "darwin":
        return Pressure.NORMAL
    level = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(level))
    sysctl = ctypes.CDLL(None).sysctlbyname
    failed = sysctl(_SYSCTL, ctypes.byref(level), ctypes.byref(size), None, 0)
    known = {pressure.value for pressure in Pressure}
    return Pressure(level.value) if not failed and level.value in known else Pressure.NORMAL


class PowerSource:
    """Remembers whether the machine runs on mains power, and reads it again in the background.

    The machine counts as on mains until the first read has ended, and where no read is possible.
    Owner: the inference thread, which never waits for a read.
    """

    def __init__(
        self, read: Callable[[], bool] | None = None, clock: Callable[[], float] = awake_s
    ) -> None:
        """`read` runs in a thread of its own, as a battery's controller may be slow."""
        self._read = read if read is not None else on_mains
        self._clock = clock
        self._read_at = 0.0
        self._is_on_mains = True

    def is_on_mains(self) -> bool:
        """Return the last value, and start another read if it is old. Never blocks."""
        now = self._clock()
        if now >= self._read_at:
            self._read_at = now + LOOK_S
            threading.Thread(target=self._read_source, name="power source", daemon=True).start()
        return self._is_on_mains

    def _read_source(self) -> None:
        self._is_on_mains = self._read()


def on_mains() -> bool:
    """Return whether the machine runs on mains power now. Any thread; may block for some ms."""
    try:
        if sys.platform != "darwin":
            return linux_on_mains(_SUPPLIES)
        # Source: IOKit/ps/IOPowerSources.h, since macOS 10.7. -1 means on battery, time unknown.
        estimate = ctypes.CDLL(_IOKIT).IOPSGetTimeRemainingEstimate
        estimate.restype = ctypes.c_double
        return bool(estimate() == _UNLIMITED)
    except (OSError, AttributeError):  # no such framework or function
        return True


def linux_on_mains(supplies: Path) -> bool:
    """Return whether a supply is plugged in, or no battery of the machine is discharging.

    The battery of a mouse, of scope Device, does not count.
    Source: Documentation/ABI/testing/sysfs-class-power.
    """
    if not supplies.is_dir():
        return True
    own = [supply for supply in supplies.iterdir() if _text(supply / "scope") != "Device"]
    if any(_text(supply / "online") not in ("", "0") for supply in own):
        return True
    return not any(_text(supply / "status") == "Discharging" for supply in own)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # the supply has no such file
        return ""
