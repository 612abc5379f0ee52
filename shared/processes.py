"""Which process is which: start times, names, and who listens on a port. Linux and macOS.

A pid alone names nothing, because the system uses it again; a pid with its start time does.
"""

import calendar
import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

_PROC = Path("/proc")
_TOOL_WAIT_S = 5.0  # ps and lsof answer in a tenth of a second
_LISTEN = "0A"  # the state column of /proc/net/tcp
_GONE = "ZX"  # a zombie holds nothing any more and only waits for its parent


def process_started(pid: int) -> float | None:
    """Return when `pid` started, or None if it is not running; only equality has a meaning.

    Linux gives clock ticks since boot, macOS seconds since 1970.
    """
    return _started_linux(pid) if sys.platform == "linux" else _started_ps(pid)


def process_name(pid: int) -> str:
    """Return the name of the program that `pid` runs, or "unknown"."""
    if sys.platform == "linux":
        try:
            return (_PROC / str(pid) / "comm").read_text(errors="replace").strip() or "unknown"
        except OSError:
            return "unknown"
    return os.path.basename(_tool("ps", "-o", "comm=", "-p", str(pid)).strip()) or "unknown"


def port_holder(port: int) -> tuple[int, str] | None:
    """Return pid and name of a process listening on TCP `port`.

    None: no process does, or it is another user's and the system hides which one it is.
    """
    return _holder_linux(port) if sys.platform == "linux" else _holder_lsof(port)


def _started_linux(pid: int) -> float | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    state, started = fields[0], fields[19]  # fields 3 and 22 of proc(5)
    return None if state in _GONE else float(started)


def _started_ps(pid: int) -> float | None:
    return _parse_ps(_tool("ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)))


def _parse_ps(line: str) -> float | None:
    """Return the start time in `Ss   Fri Nov 21 11:46:02 2025`, read as UTC."""
    state, _, started = line.strip().partition(" ")
    if not started or state[0] in _GONE:
        return None
    return float(calendar.timegm(time.strptime(started.strip(), "%a %b %d %H:%M:%S %Y")))


def _holder_linux(port: int) -> tuple[int, str] | None:
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    for pid in sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()):
        if sockets & _open_files(pid):
            return pid, process_name(pid)
    return None


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue  # a kernel without IPv6
        for fields in map(str.split, lines):
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes


def _open_files(pid: int) -> set[str]:
    """Return what the descriptors of `pid` point at; empty for another user's process."""
    found = set()
    with contextlib.suppress(OSError):  # not ours to see, or it ended meanwhile
        for entry in os.scandir(_PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(entry.path))
    return found


def _holder_lsof(port: int) -> tuple[int, str] | None:
    try:
        listing = _tool("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc")
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = re.search(r"^p(\d+)\nc(.*)$", listing, re.MULTILINE)
    return (int(first[1]), first[2]) if first else None


def _tool(*command: str) -> str:
    """Return what `command` prints, in C locale and UTC; empty if it finds nothing.

    Raises:
        OSError, subprocess.TimeoutExpired: it gave no answer, which must not read as "nothing".
    """
    path = os.environ.get("PATH", "") + ":/bin:/usr/bin:/usr/sbin"
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC", "PATH": path}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=environment,
        timeout=_TOOL_WAIT_S,
    )
    return done.stdout
