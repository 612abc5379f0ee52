"""Reads how short of memory the system says it is. macOS alone says it."""

import ctypes
import sys
from enum import IntEnum
from typing import Final

_SYSCTL: Final = b"kern.memorystatus_vm_pressure_level"


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
    library = ctypes.CDLL(None)
    failed = library.sysctlbyname(_SYSCTL, ctypes.byref(level), ctypes.byref(size), None, 0)
    known = {each.value for each in Pressure}
    return Pressure(level.value) if not failed and level.value in known else Pressure.NORMAL
