"""Starts the ranks that are on rank 0's machine, and says when one of them ended.

A follower ends itself when its standard input reaches its end, which it does however rank 0 dies.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

STATUS_WAIT_S: Final = 2.0  # for the status of a process whose connection ended
FOLLOWER: Final = (sys.executable, "-m", "hearth.worker.ranks.follower_main")


class RankProcesses:
    """Holds the processes of local followers. Owner: the inference thread.

    Any thread may call `kill` and `how_ended`.
    """

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._watchers: list[threading.Thread] = []

    def start(
        self,
        ranks: Iterable[int],
        endpoint: str,
        on_end: Callable[[int, str], None],
        command: Sequence[str] = FOLLOWER,
    ) -> None:
        """Start one process a rank; each has its own end of a pipe as its standard input.

        `on_end` is told a rank and how it ended, on a thread of its own.
        """
        for rank in ranks:
            process = self._processes[rank] = subprocess.Popen(
                [*command, "--leader", endpoint, "--rank", str(rank)],
                stdin=subprocess.PIPE,  # held open for as long as this process lives
                env=os.environ,
            )
            watcher = threading.Thread(
                target=_watch, args=(process, rank, on_end), name="rank process", daemon=True
            )
            self._watchers.append(watcher)
            watcher.start()

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def how_ended(self, rank: int) -> str:
        """Return how the process of `rank`, whose connection ended, ended; "" = it is not known.

        The system closes the connections of a process some time before it tells its status.
        """
        with contextlib.suppress(KeyError, subprocess.TimeoutExpired):
            return how_ended(self._processes[rank].wait(STATUS_WAIT_S))
        return ""

    def kill(self) -> None:
        """End them now; one that was stopped would not see that its standard input ends."""
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        """Have all of them end, and wait for it."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for watcher in self._watchers:
            watcher.join()


def _watch(
    process: "subprocess.Popen[bytes]", rank: int, on_end: Callable[[int, str], None]
) -> None:
    on_end(rank, how_ended(process.wait()))


def how_ended(code: int) -> str:
    """Return how a process ended, from its return code."""
    return f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
