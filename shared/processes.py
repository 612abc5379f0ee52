"""Identifies processes by pid and start time, because the system reuses pids. Linux and macOS.

The supervisor writes both, for itself and its children, into `hearth.json` in its instance
directory.
"""

import contextlib
import sys
from pathlib import Path

import psutil

PID_FILE = "hearth.json"


def process_started(pid: int) -> float | None:
    """Return the start time of `pid`, or None if it is not running; compare for equality only.

    Linux gives clock ticks since boot, which setting the clock does not change; macOS gives
    seconds. A zombie counts as not running.
    """
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
        state, started = fields[0], fields[19]  # fields 3 and 22 of proc(5)
        return None if state in "ZX" else float(started)
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE:
            return float(process.create_time())
    return None
