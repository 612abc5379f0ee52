"""Tells on which machine a run was made, and who else computes there. No host or user is named."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil

from hearth.shared.paths import CODE_DIR

_WATCH_S: Final = 1.0
_BUSY_SHARE: Final = 0.2  # of one core: a server that rests takes less
_SERVES: Final = ("hearth.proxy.main", "hearth.commands.main serve", "/hearth serve")
_TOOL_WAIT_S: Final = 5.0


def machine_text() -> str:
    """Return chip, cores, memory and system, and whether it runs on its battery."""
    memory = psutil.virtual_memory().total / 2**30
    parts = [_chip(), _cores(), f"{memory:.0f} GiB", _system()]
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is not None and battery.power_plugged is False:
        parts.append("on its battery")
    return ", ".join(parts)


def _cores() -> str:
    """Return how many cores this process and the servers may use, in words."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    return f"{count} core{'s' * (count != 1)}"


def commit() -> str:
    """Return the commit of a checkout; "" in an install. "+" says that files differ from it."""
    if not (CODE_DIR / ".git").exists():
        return ""
    revision = _said("git", "-C", str(CODE_DIR), "rev-parse", "--short=10", "HEAD")
    changed = _said(
        "git", "-C", str(CODE_DIR), "status", "--porcelain", "--untracked-files=no", "--", "*.py"
    )
    return revision + ("+" if changed else "")


def now() -> str:
    """Return the time in UTC, to a second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def load() -> float:
    """Return how many processes wanted a core in the last minute."""
    return round(os.getloadavg()[0], 2)


def computing_servers() -> list[int]:
    """Return the pids of Hearth servers on this machine that compute now. Takes a second."""
    families = {server.pid: _family(server) for server in psutil.process_iter() if _serves(server)}
    if not families:
        return []
    before = {pid: _cpu_s(family) for pid, family in families.items()}
    time.sleep(_WATCH_S)
    return [
        pid
        for pid, family in families.items()
        if _cpu_s(family) - before[pid] > _BUSY_SHARE * _WATCH_S
    ]


def _serves(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:  # it has ended, or is another user's
        return False
    is_python = bool(words) and "python" in Path(words[0]).name.lower()
    return is_python and any(each in " ".join(words) for each in _SERVES)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return [process]


def _cpu_s(family: list[psutil.Process]) -> float:
    total = 0.0
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _chip() -> str:
    if sys.platform == "darwin":
        return _said("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{platform.system()} {platform.machine()}"


def _said(*command: str) -> str:
    """Return what a small tool prints; "" where it cannot be asked."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TOOL_WAIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
