"""The pid file names a process by its start, so that nobody else's is ever ended for it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.take_port import IdentifiedProcess, read_pid_file
from hearth.proxy.workers import pid_file as module
from hearth.proxy.workers.pid_file import PidFile

WORKER = 4_000_000  # a pid that Linux gives to nobody


def read(pid_file: PidFile) -> dict[str, Any]:
    return dict(json.loads(pid_file.path.read_text()))


def test_it_names_processes_by_their_start(tmp_path: Path) -> None:
    pid_file = PidFile(tmp_path, "127.0.0.1", 4000)
    pid_file.write([os.getpid()])
    row = read(pid_file)
    assert row["supervisor"] == {"pid": os.getpid(), "started": row["supervisor"]["started"]}
    assert row["children"][0]["role"] == "worker"
    assert row["supervisor"]["started"] is not None
    assert pid_file.path.stat().st_mode & 0o777 == 0o600
    pid_file.remove()
    assert not list(tmp_path.iterdir())


def test_a_pid_that_is_used_again_is_named_by_its_own_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker died, and its pid became the next worker's, or somebody else's."""
    starts = {os.getpid(): 1.0, WORKER: 2.0}
    monkeypatch.setattr(module, "process_started", starts.get)
    pid_file = PidFile(tmp_path, "127.0.0.1", 4000)
    pid_file.write([WORKER, WORKER + 1])
    pid_file.write([WORKER + 1])
    starts[WORKER] = 3.0
    starts[WORKER + 1] = 4.0
    pid_file.write([WORKER, WORKER + 1])
    assert read_pid_file(pid_file.path) == (
        IdentifiedProcess(os.getpid(), 1.0),
        [IdentifiedProcess(WORKER, 3.0), IdentifiedProcess(WORKER + 1, 4.0)],
    ), "one that was not running when it was asked for is asked for again"
    pid_file.remove()


def test_a_directory_that_takes_no_file_ends_no_supervision(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    pid_file = PidFile(tmp_path / "file", "127.0.0.1", 4000)
    pid_file.write([])
    assert "pid file cannot be written" in caplog.text
