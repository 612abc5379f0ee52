"""Limits the CPU time, memory and files of this process, which ends if it exceeds a limit.

Helper processes call `limit_process` before they read data from clients.
"""

import os
import resource
import sys
import threading
import time
from typing import Final

LOOK_S: Final = 0.05  # time between two measurements of the memory
OPEN_FILES_MAX: Final = 32
MEMORY_STATUS: Final = 77  # exit status of a process that uses too much memory


def limit_process(cpu_s_max: int, memory_bytes_max: int) -> None:
    """Limit the CPU time and the memory beyond the current use, and forbid writing files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would hold a client's words
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES_MAX, OPEN_FILES_MAX))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s_max, cpu_s_max + 1))
    try:
        most = virtual_bytes() + memory_bytes_max
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (OSError, ValueError):  # macOS has no such limit
        most = resident_bytes() + memory_bytes_max
        threading.Thread(target=_watch_memory, args=(most,), daemon=True).start()


def virtual_bytes() -> int:
    """Return the address space in use. Raises: OSError: the system has no /proc."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def resident_bytes() -> int:
    """Return the peak of this process's resident memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _watch_memory(bytes_max: int) -> None:
    while resident_bytes() < bytes_max:
        time.sleep(LOOK_S)
    os._exit(MEMORY_STATUS)
