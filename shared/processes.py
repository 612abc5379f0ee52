"""Identifies processes, and finds which one holds a port. Linux and macOS, standard library only.

A pid alone names nothing, because the system uses it again; a pid with its start time does. The
supervisor writes both, its own and its children's, into `hearth.json` in its instance directory.
"""

import calendar
import contextlib
import errno
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hearth.shared.errors import StartError
from hearth.shared.listen_addresses import is_address, listen_addresses
from hearth.shared.read_small_file import read_small_file
from hearth.shared.stop_signals import SAY_AFTER_S
from hearth.shared.stop_times import CHUNK_WAIT_S, END_WAIT_S

PID_FILE = "hearth.json"
_PID_FILE_BYTES_MAX = 1 << 20

_PROC = Path("/proc")
_TOOL_WAIT_S = 5.0  # ps and lsof answer in a tenth of a second
_LISTEN = "0A"  # the state column of /proc/net/tcp
_GONE = "ZX"  # a zombie holds nothing any more and only waits for its parent


def process_started(pid: int) -> float | None:
    """Return when `pid` started, or None if it is not running; only equality has a meaning.

    Linux gives clock ticks since boot, macOS seconds since 1970.
    """
    return _started_linux(pid) if sys.platform == "linux" else started_ps(pid)


def process_name(pid: int) -> str:
    """Return the name of the program that `pid` runs, or "unknown"."""
    if sys.platform == "linux":
        try:
            return (_PROC / str(pid) / "comm").read_text(errors="replace").strip() or "unknown"
        except OSError:
            return "unknown"
    try:
        return os.path.basename(_tool("ps", "-o", "comm=", "-p", str(pid)).strip()) or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def port_holder(port: int) -> tuple[int, str] | None:
    """Return pid and name of a process listening on TCP `port`.

    None: no process does, or it is another user's and the system hides which one it is.
    """
    return holder_linux(port) if sys.platform == "linux" else holder_lsof(port)


@dataclass(frozen=True, slots=True)
class IdentifiedProcess:
    """One process for all time: a later one with the same pid started later."""

    pid: int
    started: float

    @property
    def is_running(self) -> bool:
        return process_started(self.pid) == self.started


def read_pid_file(path: Path) -> tuple[IdentifiedProcess | None, list[IdentifiedProcess]]:
    """Return supervisor and children that `path` names.

    Nobody where the file is missing or damaged: without a supervisor that can be called dead, no
    child is anybody's to end.
    """
    try:
        record = json.loads(read_small_file(path, _PID_FILE_BYTES_MAX))
        supervisor = _process(record["supervisor"])
        children = [_process(row) for row in record["children"]]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None, []
    return supervisor, [child for child in children if child] if supervisor else []


def _process(row: dict[str, Any]) -> IdentifiedProcess | None:
    """Return the process in `row`, or None where it names none for sure."""
    pid, started = row["pid"], row["started"]
    if type(pid) is not int or pid < 2:  # 0 and below would signal whole groups of processes
        return None
    return IdentifiedProcess(pid, float(started)) if isinstance(started, int | float) else None


def end_processes(
    processes: Iterable[IdentifiedProcess], wait_s: float = CHUNK_WAIT_S + END_WAIT_S
) -> None:
    """End those of `processes` that still run: SIGTERM, and SIGKILL after `wait_s`.

    One that still writes by then has left the GPU.
    """
    left = list(processes)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            if process.is_running:
                assert process.pid > 1, process.pid  # 0 and below would signal whole groups
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, number)
        left = _left_after(left, min(wait_s, SAY_AFTER_S))
        if left and number == signal.SIGTERM:
            pids = ", ".join(str(each.pid) for each in left)
            text = f"waiting for workers of a Hearth that died (pid {pids}, up to {wait_s:g} s)"
            print(text, file=sys.stderr, flush=True)
            left = _left_after(left, wait_s - SAY_AFTER_S)


def _left_after(processes: list[IdentifiedProcess], wait_s: float) -> list[IdentifiedProcess]:
    """Wait until all of `processes` have ended, for so long; return those that have not."""
    deadline = time.monotonic() + wait_s
    while (left := [each for each in processes if each.is_running]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def take_port(host: str, port: int, instance_dir: Path, *, is_check: bool = False) -> str:
    """Return a sentence about `port`, which is free now, also from a Hearth that died there.

    Ends processes that the pid file of a dead supervisor names, then removes it and its sockets.
    A living Hearth is never ended, nor is anybody else. With `is_check` it changes nothing.

    Raises:
        StartError: the port is not to be had.
    """
    supervisor, children = read_pid_file(instance_dir / PID_FILE)
    if supervisor and supervisor.is_running:
        raise StartError(
            f"Hearth already runs on {url_of(host, port)} (pid {supervisor.pid}). "
            f"Stop it with: kill {supervisor.pid}"
        )
    stale = [child for child in children if child.is_running]
    was_free = can_listen(host, port)
    if is_check and (was_free or _is_held_by(stale, port)):
        return (
            f"{port} is free" if was_free else f"{port} is held by a stale Hearth; a start ends it"
        )
    if not is_check:
        end_processes(stale)
    if not can_listen(host, port):
        raise StartError(_held_text(port))
    _sweep(instance_dir)
    return f"{port} is free" if was_free else f"freed port {port} from a stale Hearth"


def can_listen(host: str, port: int) -> bool:
    """Tell whether a server could listen on all addresses of `host` and on `port` now.

    Raises:
        StartError: none ever could.
    """
    if not all([_can_listen(address, port) for address in listen_addresses(host)]):
        return False
    # macOS binds 127.0.0.1 although another has 0.0.0.0
    return sys.platform != "darwin" or port_holder(port) is None


def _can_listen(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise StartError(
                f"Can't listen on {address}, port {port}: {error.strerror}. Choose an address of "
                "this machine and a port above 1023; a server's are PROXY_HOST and PROXY_PORT."
            ) from None
    return True


def _is_held_by(processes: Iterable[IdentifiedProcess], port: int) -> bool:
    holder = port_holder(port)
    return holder is not None and holder[0] in [process.pid for process in processes]


def _held_text(port: int) -> str:
    holder = port_holder(port)
    who = f"pid {holder[0]} ({holder[1]})" if holder else "another user's process"
    return (
        f"Port {port} is held by {who}, which is not Hearth's and is left alone. "
        f"End it, or choose another port, such as {port + 1 if port < 65535 else 4000}."
    )


def _sweep(instance_dir: Path) -> None:
    for path in [*instance_dir.glob("*.sock"), instance_dir / PID_FILE]:
        path.unlink(missing_ok=True)


def url_of(host: str, port: int) -> str:
    """Return where a server that listens on `host` is reached from this machine."""
    shown = host
    if is_address(host) and (address := ipaddress.ip_address(host)).is_unspecified:
        shown = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _started_linux(pid: int) -> float | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    state, started = fields[0], fields[19]  # fields 3 and 22 of proc(5)
    return None if state in _GONE else float(started)


def started_ps(pid: int) -> float | None:
    return parse_ps(_tool("ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)))


def parse_ps(line: str) -> float | None:
    """Return the start time in `Ss   Fri Nov 21 11:46:02 2025`, read as UTC."""
    state, _, started = line.strip().partition(" ")
    if not started or state[0] in _GONE:
        return None
    return float(calendar.timegm(time.strptime(started.strip(), "%a %b %d %H:%M:%S %Y")))


def holder_linux(port: int) -> tuple[int, str] | None:
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


def holder_lsof(port: int) -> tuple[int, str] | None:
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
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    environment["PATH"] = environment.get("PATH", "") + ":/bin:/usr/bin:/usr/sbin"
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
