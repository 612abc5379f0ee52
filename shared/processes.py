"""Identifies processes: a pid alone names nothing, because the system uses it again. Linux, macOS.

A pid with its start time does. The supervisor writes both, its own and its children's, into
`hearth.json` in its instance directory.
"""

import contextlib
import sys
from pathlib import Path

import psutil

PID_FILE = "hearth.json"


def process_started(pid: int) -> float | None:
    """Return when `pid` started, or None if it is not running; only equality has a meaning.

    Linux gives clock ticks since boot, which no setting of the clock changes, macOS seconds. A
    zombie holds nothing any more and only waits for its parent.
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
