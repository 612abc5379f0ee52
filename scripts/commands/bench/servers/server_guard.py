"""Ends a measured server and removes its files once the bench has gone without doing so.

After `kill -9` of the bench a server would go on with gigabytes of memory, and the KV of its model
would stay on the disk. This program waits for the end of a pipe that the bench holds, at no cost:

    python server_guard.py PID HOME DIRECTORY

A byte in the pipe says that the server has ended; its end without one, that the bench is gone.
Then the process PID, all below it, and all that are metered in HOME are killed, and DIRECTORY is
removed.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

KILLS_MAX = 20  # looks for processes, with a pause: some begin while others are killed
PAUSE_S = 0.1
CLOCK_S = 2.0  # by which a process's start may seem later than it was


class ServerGuard:
    """Watches over one server until `release`. Owner: the event loop of the bench."""

    def __init__(self, pid: int, home: Path, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(pid), str(home), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the bench's group does not end it
        )

    def release(self) -> None:
        """Have it go: the server has ended."""
        with contextlib.suppress(OSError):  # somebody has killed it
            self._process.communicate(b".")


def metered(directory: Path) -> Iterator[tuple[int, float]]:
    """Yield the processes that were metered in `directory`, each with when its meter began."""
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:
        return
    for name in names:
        pid, _, began_ns = name.partition("-")
        if pid.isdecimal() and began_ns.isdecimal():
            yield int(pid), int(began_ns) / 1e9


def is_same(created_s: float, known_s: float) -> bool:
    """Say whether a process that began at `created_s` can be one that was known at `known_s`.

    One that began later only has its number: the system gives numbers anew.
    """
    return created_s <= known_s + CLOCK_S


def main(pid: int, home: Path, directory: Path) -> None:
    """Wait, and end what is left."""
    began_s = time.time()
    if os.read(sys.stdin.fileno(), 1):
        return
    for _ in range(KILLS_MAX):
        if not _kill([(pid, began_s), *metered(home / "meter")]):
            break
        time.sleep(PAUSE_S)
    shutil.rmtree(directory, ignore_errors=True)


def _kill(known: list[tuple[int, float]]) -> bool:
    """Kill processes and all below them; return whether there were any."""
    import psutil  # late: it takes time, and mostly it is never needed

    left = set()
    for pid, known_s in known:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if is_same(process.create_time(), known_s):
                left |= {process, *process.children(recursive=True)}
    is_any = False
    for each in left:
        with contextlib.suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE:
                each.kill()
                is_any = True
    return is_any


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
