"""The install command: whose a process is, which port may be taken, what becomes of the command.

The processes are real ones, a few milliseconds old.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

import install_and_run
from hearth.shared import processes
from hearth.shared.errors import StartError
from hearth.shared.processes import (
    IdentifiedProcess,
    end_processes,
    process_started,
    read_pid_file,
    take_port,
)
from install_and_run import PROJECT, Stop

pytestmark = pytest.mark.process

HOST = "127.0.0.1"
LISTENER = """
import signal, socket, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
signal.pause()
"""


@contextlib.contextmanager
def listener(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """A process that listens on a port until it is ended."""
    command = [sys.executable, "-c", LISTENER, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture
def held() -> Iterator[tuple["subprocess.Popen[str]", int]]:
    with listener() as pair:
        yield pair


def identity(pid: int) -> IdentifiedProcess:
    started = process_started(pid)
    assert started is not None
    return IdentifiedProcess(pid, started)


def ended() -> IdentifiedProcess:
    """A process that is no more."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        was = identity(process.pid)
    return was


def write_pid_file(
    directory: Path, supervisor: IdentifiedProcess, *children: IdentifiedProcess
) -> None:
    def row(process: IdentifiedProcess) -> dict[str, object]:
        return {"pid": process.pid, "started": process.started}

    record = {
        "supervisor": row(supervisor),
        "children": [{**row(child), "role": "worker 0"} for child in children],
        "host": HOST,
        "port": 1,
    }
    directory.mkdir(exist_ok=True)
    (directory / "hearth.json").write_text(json.dumps(record))
    (directory / "worker-0.sock").touch()


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# ---- which process is which ----


@pytest.fixture(params=["linux", "darwin"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "linux" and sys.platform != "linux":
        pytest.skip("reads /proc, which only Linux has")
    monkeypatch.setattr(sys, "platform", request.param)
    return str(request.param)


def test_a_process_keeps_its_start_time_and_another_has_a_later_one(system: str) -> None:
    own = process_started(os.getpid())
    assert own is not None and own == process_started(os.getpid()), system
    with listener() as (process, _):
        assert identity(process.pid).started > own


def test_a_process_that_ended_has_no_start_time_even_while_its_parent_has_not_looked(
    held: tuple["subprocess.Popen[str]", int], system: str
) -> None:
    process, _ = held
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert process_started(process.pid) is None, system
    process.wait()
    assert process_started(process.pid) is None


def test_the_holder_of_a_port_is_found_with_its_name(
    held: tuple["subprocess.Popen[str]", int],
) -> None:
    process, port = held
    pid, name = processes.port_holder(port) or (0, "")
    assert pid == process.pid and "python" in name.lower()
    process.kill()
    process.wait()
    assert processes.port_holder(port) is None


def test_a_process_that_ignores_sigterm_is_waited_for_told_and_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "SAY_AFTER_S", 0.1)
    with listener("stubborn") as (process, _):
        end_processes([identity(process.pid)], wait_s=0.2)
        assert process.wait(1) == -9
        told = capsys.readouterr().err.splitlines()
        assert told == [
            f"waiting for workers of a Hearth that died (pid {process.pid}, up to 0.2 s)"
        ]


@pytest.mark.parametrize(
    "row",
    [
        {"pid": 0, "started": 1},
        {"pid": -1, "started": 1},
        {"pid": 1, "started": 1},
        {"pid": True, "started": 1},
        {"pid": "7", "started": 1},
        {"pid": 7, "started": None},
        {"pid": 7, "started": 10**400},
        {"pid": 7},
        [],
    ],
)
def test_a_damaged_pid_file_names_nobody(row: object, tmp_path: Path) -> None:
    good = {"pid": 7, "started": 1}
    path = tmp_path / "hearth.json"
    path.write_text(json.dumps({"supervisor": row, "children": [good]}))
    assert read_pid_file(path) == (None, [])
    path.write_text('{"supervisor"')
    assert read_pid_file(path) == (None, [])
    path.write_text("[" * 100_000)
    assert read_pid_file(path) == (None, [])


# ---- whose a port is ----


def test_a_free_port_is_taken_and_what_a_dead_hearth_left_is_removed(
    tmp_path: Path, held: tuple["subprocess.Popen[str]", int]
) -> None:
    process, port = held
    process.kill()
    process.wait()
    write_pid_file(tmp_path, ended(), ended())
    (tmp_path / "notes.txt").touch()
    assert take_port(HOST, port, tmp_path) == f"{port} is free"
    assert left_in(tmp_path) == ["notes.txt"]
    assert take_port(HOST, port, tmp_path / "none-yet") == f"{port} is free"


def test_a_port_held_by_a_child_of_a_dead_hearth_is_freed(
    tmp_path: Path, held: tuple["subprocess.Popen[str]", int]
) -> None:
    process, port = held
    write_pid_file(tmp_path, ended(), identity(process.pid))
    assert take_port(HOST, port, tmp_path) == f"freed port {port} from a stale Hearth"
    assert process.wait(1) == -15
    assert left_in(tmp_path) == []


def test_a_living_hearth_is_never_ended(
    tmp_path: Path, held: tuple["subprocess.Popen[str]", int]
) -> None:
    process, port = held
    with listener() as (child, _):
        write_pid_file(tmp_path, identity(process.pid), identity(child.pid))
        with pytest.raises(StartError) as refusal:
            take_port(HOST, port, tmp_path)
        assert child.poll() is None and process.poll() is None
    assert str(refusal.value) == (
        f"Hearth already runs on http://127.0.0.1:{port} (pid {process.pid}). "
        f"Stop it with: kill {process.pid}"
    )
    assert left_in(tmp_path) == ["hearth.json", "worker-0.sock"]


def test_a_hearth_that_is_still_starting_keeps_its_files(
    tmp_path: Path, held: tuple["subprocess.Popen[str]", int]
) -> None:
    starting, _ = held
    write_pid_file(tmp_path, identity(starting.pid))
    with listener() as (process, free_port):
        process.kill()
        process.wait()
    with pytest.raises(StartError, match="already runs"):
        take_port(HOST, free_port, tmp_path)
    assert left_in(tmp_path) == ["hearth.json", "worker-0.sock"]


def test_a_process_that_got_the_pid_of_a_dead_child_is_left_alone(
    tmp_path: Path, held: tuple["subprocess.Popen[str]", int]
) -> None:
    process, port = held
    now = identity(process.pid)
    before = IdentifiedProcess(now.pid, now.started - 1)
    write_pid_file(tmp_path, before, before)
    with pytest.raises(StartError, match=rf"held by pid {process.pid} \("):
        take_port(HOST, port, tmp_path)
    assert process.poll() is None


def test_a_strangers_port_is_reported_with_its_process_and_everything_left_alone(
    tmp_path: Path, held: tuple["subprocess.Popen[str]", int]
) -> None:
    process, port = held
    (tmp_path / "worker-0.sock").touch()
    with pytest.raises(StartError) as refusal:
        take_port(HOST, port, tmp_path)
    name = psutil.Process(process.pid).name()
    assert f"Port {port} is held by pid {process.pid} ({name})" in str(refusal.value)
    assert f"such as {port + 1}" in str(refusal.value)
    assert process.poll() is None
    assert left_in(tmp_path) == ["worker-0.sock"]


def test_a_check_says_what_a_start_would_do_and_does_nothing(
    tmp_path: Path, held: tuple["subprocess.Popen[str]", int]
) -> None:
    process, port = held
    write_pid_file(tmp_path, ended(), identity(process.pid))
    assert "a start ends it" in take_port(HOST, port, tmp_path, is_check=True)
    assert process.poll() is None
    assert left_in(tmp_path) == ["hearth.json", "worker-0.sock"]
    process.kill()
    process.wait()
    assert take_port(HOST, port, tmp_path, is_check=True) == f"{port} is free"
    assert left_in(tmp_path) == ["hearth.json", "worker-0.sock"]


# ---- what becomes of the command ----


class Became(Exception):
    """Stands for the process that we were replaced by."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Installed, with `.venv` being this Python's; becoming another process raises `Became`."""

    def execve(path: str, command: list[str], environ: dict[str, str]) -> NoReturn:
        assert path == command[0]
        raise Became(command[1:], environ, os.getcwd())

    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(install_and_run, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(install_and_run, "prepare", lambda venv, extras: None)
    monkeypatch.setattr(install_and_run, "write_env", lambda project: None)
    monkeypatch.setattr(install_and_run, "fetch_model", lambda venv: None)
    monkeypatch.setattr(install_and_run.signal, "signal", lambda number, handler: None)
    monkeypatch.setenv("PYTHONPATH", "/ros")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["serve"]),
        (
            ["--model", "org/name", "--port", "4001"],
            ["serve", "--model", "org/name", "--port", "4001"],
        ),
        (["--check", "--workers", "2"], ["check", "--workers", "2"]),
        (["service", "logs", "-n", "3"], ["service", "logs", "-n", "3"]),
        (["launch", "claude", "--", "-p", "hi"], ["launch", "claude", "--", "-p", "hi"]),
    ],
)
def test_the_command_becomes_hearth_where_the_user_is(
    options: list[str], words: list[str], started: Path
) -> None:
    with pytest.raises(Became) as became:
        install_and_run.main(options)
    command, environ, directory = became.value.args
    assert command == ["-P", "-m", "hearth.commands.main", *words] and directory == str(started)
    assert "PYTHONPATH" not in environ and environ["HOME"] == os.environ["HOME"]


@pytest.mark.parametrize(
    ("arguments", "is_asked"),
    [
        ([], True),
        (["--check", "--port", "4001"], True),
        (["launch", "claude"], True),
        (["--model", "org/name"], False),
        (["launch", "claude", "--model=org/name"], False),
        (["run", "qwen3.5-9b"], False),
        (["pull", "qwen3.5-9b"], False),
        (["test", "fast"], False),
    ],
)
def test_the_default_model_is_fetched_for_who_names_no_other(
    arguments: list[str], is_asked: bool, started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(install_and_run, "fetch_model", asked.append)
    with pytest.raises(Became):
        install_and_run.main(arguments)
    assert asked == [started / ".venv"] * is_asked


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["-q", "--help", "tests/unit", "--port"], "pytest"),
        ([], "tests.helpers.run_suite"),
        (["all"], "tests.helpers.run_suite"),
        (["fast"], "tests.helpers.run_suite"),
    ],
)
def test_the_test_command_becomes_the_suite_or_pytest_with_every_argument(
    arguments: list[str], module: str, started: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = []
    monkeypatch.setattr(install_and_run, "prepare", lambda venv, extras: installed.append(extras))
    with pytest.raises(Became) as became:
        install_and_run.main(["test", *arguments])
    assert became.value.args[0] == ["-m", module, *arguments]
    assert became.value.args[2] == str(PROJECT)
    assert installed == [["dev", "vision"]]


@pytest.mark.parametrize(
    ("options", "extras"),
    [
        ([], []),
        (["--no-vision"], ["no-vision"]),
        (["--vision", "--no-model"], ["vision", "no-model"]),
    ],
)
def test_the_options_say_which_extras_are_installed(
    started: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], extras: list[str]
) -> None:
    installed = []

    def prepare(venv: Path, wanted: list[str]) -> NoReturn:
        installed.append(wanted)
        raise Stop("enough")

    monkeypatch.setattr(install_and_run, "prepare", prepare)
    assert install_and_run.main(options) == 1
    assert installed == [extras]
