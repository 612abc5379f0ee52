"""Measures what this process takes of the machine's memory, MLX's arrays and all else.

MLX counts its own arrays; the system counts the process: Python's objects (sessions, tokens,
tokeniser), libraries, what malloc keeps, and what a driver holds for the arrays.
"""

import ctypes
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import mlx.core as mx

_RUSAGE_INFO_V2: Final = 2
_WORDS: Final = 64  # rusage_info_v2 is 20 words of 8 bytes; later kernels write no more into it
_FOOTPRINT_WORD: Final = 9  # after a UUID of two words: ri_phys_footprint
OVERHEAD_MAX: Final = 0.15
MEASURES_MAX: Final = 20  # two a second are made: 10 s
_STATM: Final = Path("/proc/self/statm")


def process_bytes() -> int:
    """Return what the system counts as this process's; 0 where it does not say. Any thread.

    On macOS that is `phys_footprint`, by which the system chooses what to end; on Linux the
    resident set. Takes microseconds.
    """
    if sys.platform == "darwin":
        return _phys_footprint()
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _phys_footprint() -> int:
    """Source: proc_pid_rusage in libproc.h, struct rusage_info_v2 in sys/resource.h."""
    words = (ctypes.c_uint64 * _WORDS)()
    failed = ctypes.CDLL(None).proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V2, ctypes.byref(words))
    return 0 if failed else int(words[_FOOTPRINT_WORD])


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
