"""Starts the ranks that are on rank 0's machine, and says when one of them ended.

A follower ends itself when its standard input reaches its end, which it does however rank 0 dies.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

log = logging.getLogger(__name__)

FOLLOWER: Final = (sys.executable, "-m", "hearth.worker.ranks.follower_main")


class RankProcesses:
    """Holds the processes of local followers. Any thread."""

    def __init__(
        self,
        ranks: Iterable[int],
        endpoint: str,
        on_end: Callable[[int, str], None],
        command: Sequence[str] = FOLLOWER,
    ) -> None:
        """Start one process a rank; each has its own end of a pipe as its standard input.

        `on_end` is told a rank and how it ended, on a thread of its own.
        """
        self._on_end = on_end
        self._processes = {
            rank: subprocess.Popen(
                [*command, "--leader", endpoint, "--rank", str(rank)],
                stdin=subprocess.PIPE,  # held open for as long as this process lives
                env=os.environ,
            )
            for rank in ranks
        }
        self._watchers = [
            threading.Thread(target=self._watch, args=pair, name="rank process", daemon=True)
            for pair in self._processes.items()
        ]
        for watcher in self._watchers:
            watcher.start()

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in self._processes.items()}

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        self._on_end(rank, how_ended(process.wait()))

    def close(self) -> None:
        """Have all of them end, and wait for it."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for watcher in self._watchers:
            watcher.join()


def how_ended(code: int) -> str:
    """Return how a process ended, from its return code."""
    return f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
