"""A worker with RANK_BACKEND=mpi becomes mpirun once, which starts ranks with its arguments."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import load_settings
from hearth.worker.mpi_launch import LIBRARY_VARIABLE, become_mpirun, library_of
from hearth.worker.ranks.transport.rank_processes import MPI_RANK_VARIABLE

MPI = {"RANKS": "3", "RANK_BACKEND": "mpi"}
ARGUMENTS = ["--worker-id", "0", "--endpoint", "ipc:///run/worker-0.sock"]


@pytest.fixture
def mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An Open MPI that is found first, and its library."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    path = tmp_path / "bin" / "mpirun"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    (tmp_path / "lib" / "libmpi.so.40").touch()
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.delenv(MPI_RANK_VARIABLE, raising=False)
    monkeypatch.delenv(LIBRARY_VARIABLE, raising=False)
    return path


def test_mpirun_starts_each_rank_with_the_workers_arguments_and_loses_none_by_itself(
    mpirun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("os.execve", lambda *call: calls.append(call))
    become_mpirun(load_settings(MPI, None), ARGUMENTS)
    ((path, command, environ),) = calls
    rank = [sys.executable, "-m", "hearth.worker.mpi_rank", *ARGUMENTS]
    assert path == command[0] == str(mpirun)
    assert command[-len(rank) - 2 :] == ["-np", "3", *rank]
    assert "recoverable" in command
    assert environ[LIBRARY_VARIABLE] == str(mpirun.parent.parent / "lib" / "libmpi.so.40")


def test_a_worker_goes_on_where_mpirun_started_it_or_none_is_asked_for(
    mpirun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("os.execve", lambda *call: calls.append(call))
    become_mpirun(load_settings({**MPI, "RANK_BACKEND": "ring"}, None), ARGUMENTS)
    become_mpirun(load_settings({**MPI, "RANKS": "1"}, None), ARGUMENTS)
    monkeypatch.setenv(MPI_RANK_VARIABLE, "0")
    become_mpirun(load_settings(MPI, None), ARGUMENTS)
    assert not calls


def test_a_library_that_the_user_named_stays(mpirun: Path) -> None:
    assert library_of(mpirun, {LIBRARY_VARIABLE: "libmpi.so.12"}) == {}
    assert library_of(mpirun, {})[LIBRARY_VARIABLE].endswith("libmpi.so.40")


def test_without_mpirun_or_with_other_machines_the_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MPI_RANK_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartError, match=r"no mpirun is found\. Install Open MPI"):
        become_mpirun(load_settings(MPI, None), ARGUMENTS)
    elsewhere = load_settings({**MPI, "RANK_HOSTS": "hosts.json"}, None)
    with pytest.raises(StartError, match="with mpi all ranks are on this one"):
        become_mpirun(elsewhere, ARGUMENTS)
