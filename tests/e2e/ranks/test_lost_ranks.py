"""Processes without a model that sum over a ring: a rank that is lost ends all of them at once."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hearth.shared.errors import EXIT_RANK_LOST
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.worker_files import take_reason
from hearth.worker.ranks.start_ranks import FOLLOWER
from scripts.harness.ranks.models_follower import COMMAND

SEEN_S_MAX = 60.0
STALL_S = 600  # far longer: silence tells of no loss before
SIGNALLED = """
import os, signal
signal.raise_signal(signal.SIGINT)
signal.raise_signal(signal.SIGTERM)
os._exit(0)
"""


class Leader:
    """A leader of plain followers, and how it ended."""

    def __init__(self, directory: Path, what: str, ranks: int, stall_s: int) -> None:
        self.socket = directory / "run" / "4000" / "worker-0.sock"
        self.socket.parent.mkdir(parents=True)
        environ = {"RUN_DIR": str(directory / "run"), "RANKS": str(ranks)}
        environ |= {"STALL_SECONDS": str(stall_s)}
        command = (sys.executable, "-m", "scripts.harness.ranks.plain_leader")
        self.process = subprocess.Popen(
            [*command, f"ipc://{self.socket}", what],
            stdout=subprocess.PIPE,
            env={**os.environ, **environ},
            cwd=PROJECT_DIR,
        )
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.followers = [psutil.Process(pid) for pid in told["pids"].values()]

    def close(self) -> None:
        for process in [self.process, *self.followers]:
            if isinstance(process, subprocess.Popen) or process.is_running():
                process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def leading(what: str, ranks: int = 2, stall_s: int = STALL_S) -> Iterator[Leader]:
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:
        leader = Leader(Path(name), what, ranks, stall_s)
        try:
            yield leader
        finally:
            leader.close()


def are_gone(processes: list[psutil.Process], wait_s: float) -> bool:
    """Wait so long for the end of all; one that nobody reaps here has ended too."""
    left = psutil.wait_procs(processes, wait_s / 2)[1]
    return all(process.status() == psutil.STATUS_ZOMBIE for process in left)


@pytest.mark.parametrize(
    ("what", "ranks"), [("idle", 2), pytest.param("sums", 3, marks=pytest.mark.night)]
)
def test_a_killed_rank_ends_all_at_once_with_its_name(what: str, ranks: int) -> None:
    with leading(what, ranks) as leader:
        time.sleep(0.2)
        leader.followers[0].kill()
        assert leader.process.wait(SEEN_S_MAX) == EXIT_RANK_LOST
        why = f"rank 1 of {ranks} (127.0.0.1) is gone: it ended by SIGKILL"
        assert take_reason(leader.socket) == why
        assert are_gone(leader.followers, SEEN_S_MAX)


@pytest.mark.parametrize("command", [FOLLOWER, COMMAND], ids=["worker", "harness"])
def test_a_rank_that_gets_a_signal_while_it_imports_mlx_leaves_it_to_rank_0(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "mlx.py").write_text(SIGNALLED)
    done = subprocess.run(
        [*command, "--leader", "ipc://none", "--rank", "1"],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=PROJECT_DIR,
    )
    assert done.returncode == 0


def test_a_rank_that_stands_still_amid_a_sum_ends_all_after_stall_seconds() -> None:
    with leading("sums", stall_s=2) as leader:
        time.sleep(0.2)
        leader.followers[0].suspend()
        assert leader.process.wait(SEEN_S_MAX) == EXIT_RANK_LOST
        assert "rank 1 of 2 (127.0.0.1) is silent for 2 s" in take_reason(leader.socket)
        assert are_gone(leader.followers, SEEN_S_MAX), "none is left behind, stopped for ever"
