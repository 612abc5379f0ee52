"""Takes the port of a server that is to start, also from a Hearth that died there.

The supervisor writes its own process and its children's into `hearth.json` in its instance
directory. Linux and macOS.
"""

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hearth.shared.errors import StartError
from hearth.shared.listen_addresses import listen_addresses, url_of
from hearth.shared.private_files import read_small_file
from hearth.shared.processes import PID_FILE, process_started
from hearth.shared.stop_signals import CHUNK_WAIT_S, END_WAIT_S, SAY_AFTER_S

_PID_FILE_BYTES_MAX = 1 << 20


def port_holder(port: int) -> tuple[int, str] | None:
    """Return pid and name of a process listening on TCP `port`.

    None: no process does, or it is another user's and the system hides which one it is.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # not ours to see, or it ended meanwhile
            rows = process.net_connections("tcp")
            if any(row.status == psutil.CONN_LISTEN and row.laddr.port == port for row in rows):
                return process.pid, process.name()
    return None


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
    holder = port_holder(port) if is_check and not was_free else None
    if is_check and (was_free or (holder and holder[0] in [child.pid for child in stale])):
        return (
            f"{port} is free" if was_free else f"{port} is held by a stale Hearth; a start ends it"
        )
    if not is_check:
        end_processes(stale)
    if not can_listen(host, port):
        holder = port_holder(port)
        who = f"pid {holder[0]} ({holder[1]})" if holder else "another user's process"
        raise StartError(
            f"Port {port} is held by {who}, which is not Hearth's and is left alone. "
            f"End it, or choose another port, such as {port + 1 if port < 65535 else 4000}."
        )
    for path in [*instance_dir.glob("*.sock"), instance_dir / PID_FILE]:
        path.unlink(missing_ok=True)
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
