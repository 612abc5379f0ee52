"""The install command: whose a process is, which port may be taken, what becomes of the command.

The processes are real ones, a few milliseconds old.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

import install_and_run
from hearth.commands import take_port as taking
from hearth.commands.take_port import IdentifiedProcess, end_processes, read_pid_file, take_port
from hearth.shared.errors import StartError
from hearth.shared.processes import process_started
from install_and_run import PROJECT
from tests.helpers.cases import cases

pytestmark = pytest.mark.process

LISTENER = """
import signal, socket, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
signal.pause()
"""


class Listener:
    """A process that listens on a port until it is ended."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-c", LISTENER, *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        with self.process.stdout as said:
            self.port = int(said.readline())
        started = process_started(self.process.pid)
        assert started is not None
        self.identity = IdentifiedProcess(self.process.pid, started)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def listen() -> Iterator[Callable[..., Listener]]:
    """Return what starts a listener, which is ended with the test."""
    made: list[Listener] = []

    def start(*arguments: str) -> Listener:
        made.append(Listener(*arguments))
        return made[-1]

    yield start
    for each in made:
        each.end()


# ---- which process is which ----


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_process_keeps_its_start_time_and_has_none_once_it_ended(
    platform: str, listen: Callable[..., Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform == "linux" and sys.platform != "linux":
        pytest.skip("reads /proc, which only Linux has")
    monkeypatch.setattr(sys, "platform", platform)
    own = process_started(os.getpid())
    assert own is not None and own == process_started(os.getpid())
    later = listen()
    assert later.identity.started > own
    later.process.kill()
    os.waitid(os.P_PID, later.process.pid, os.WEXITED | os.WNOWAIT)
    assert process_started(later.process.pid) is None, "a zombie, as its parent has not looked"
    later.process.wait()
    assert process_started(later.process.pid) is None


def test_a_process_that_ignores_sigterm_is_waited_for_told_and_killed(
    listen: Callable[..., Listener],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(taking, "SAY_AFTER_S", 0.1)
    stubborn = listen("stubborn")
    end_processes([stubborn.identity], wait_s=0.2)
    assert stubborn.process.wait(1) == -9
    told = f"waiting for workers of a Hearth that died (pid {stubborn.process.pid}, up to 0.2 s)\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    "text",
    [
        '{"supervisor"',
        "[" * 100_000,
        *(
            json.dumps({"supervisor": row, "children": [{"pid": 7, "started": 1}]})
            for row in (
                *({"pid": pid, "started": 1} for pid in (0, -1, 1, True, "7")),
                *({"pid": 7, "started": None}, {"pid": 7, "started": 10**400}, {"pid": 7}, []),
            )
        ),
    ],
)
def test_a_damaged_pid_file_names_nobody(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hearth.json"
    path.write_text(text)
    assert read_pid_file(path) == (None, [])


# ---- whose a port is ----


def port_told(case: dict[str, Any], directory: Path, listen: Callable[..., Listener]) -> str:
    """Take the port of `case`; return what is said of it, checked for what was left."""
    dead, holder, orphan = listen(), listen(), listen()
    dead.end()
    before = IdentifiedProcess(holder.process.pid, holder.identity.started - 1)
    who = {"dead": dead.identity, "holder": holder.identity}
    who |= {"another": before, "orphan": orphan.identity}
    rows = [{"pid": who[each].pid, "started": who[each].started} for each in case["file"]]
    name = psutil.Process(holder.process.pid).name()
    words: dict[str, object] = {
        "port": holder.port,
        "pid": before.pid,
        "next": holder.port + 1,
        "name": name,
    }
    for file in ("worker-0.sock", "notes.txt"):
        (directory / file).touch()
    if rows:
        record = {"supervisor": rows[0], "children": [{**rows[1], "role": "worker 0"}]}
        record |= {"host": "127.0.0.1", "port": 1}
        (directory / "hearth.json").write_text(json.dumps(record))
    if case.get("is_free"):
        holder.end()
    try:
        is_check = case.get("is_check", False)
        said = take_port("127.0.0.1", holder.port, directory, is_check=is_check)
    except StartError as error:
        said = f"refused: {error}"
    assert case["told"].format(**words) in said
    assert sorted(path.name for path in directory.iterdir()) == case["left"]
    for name, each in (("holder", holder), ("orphan", orphan)):
        if case.get("ends") == name:
            assert each.process.wait(1) == -15
        elif each is orphan or not case.get("is_free"):
            assert each.process.poll() is None
    return said


@pytest.mark.parametrize("case", cases("install/ports.yaml", "taken"))
def test_a_port_that_is_free_or_an_orphans_is_taken(
    case: dict[str, Any], tmp_path: Path, listen: Callable[..., Listener]
) -> None:
    assert not port_told(case, tmp_path, listen).startswith("refused")


@pytest.mark.parametrize("case", cases("install/ports.yaml", "refused"))
def test_a_port_of_who_lives_is_refused_and_nobody_is_ended(
    case: dict[str, Any], tmp_path: Path, listen: Callable[..., Listener]
) -> None:
    assert port_told(case, tmp_path, listen).startswith("refused")


# ---- what becomes of the command ----


class Became(Exception):
    """Stands for the process that we were replaced by."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Have another process raise `Became`; return what is installed and fetched before."""
    done: list[Any] = []

    def execve(path: str, command: list[str], environ: dict[str, str]) -> NoReturn:
        assert path == command[0] and "PYTHONPATH" not in environ
        assert environ["HOME"] == os.environ["HOME"]
        raise Became(command[1:], Path.cwd())

    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(install_and_run, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(install_and_run, "prepare", lambda venv, extras: done.append(extras))
    monkeypatch.setattr(install_and_run, "write_env", lambda project: None)
    monkeypatch.setattr(install_and_run, "fetch_model", lambda venv: done.append("model"))
    monkeypatch.setattr("install_and_run.signal.signal", lambda number, handler: None)
    monkeypatch.setenv("PYTHONPATH", "/ros")
    monkeypatch.chdir(tmp_path)
    return done


@pytest.mark.parametrize("case", cases("install/commands.yaml"))
def test_the_command_becomes_hearth_or_the_suite_with_what_it_needs_installed(
    case: dict[str, Any], asked: list[Any], tmp_path: Path
) -> None:
    with pytest.raises(Became) as became:
        install_and_run.main(case["given"].split())
    words, directory = became.value.args
    assert words == case["becomes"].split()
    assert directory == (PROJECT if case["given"].startswith("test") else tmp_path)
    assert asked == case["asked"]


def test_a_child_that_ended_before_it_was_written_down_hides_nobody_else(tmp_path: Path) -> None:
    gone, good = {"pid": 8, "started": None}, {"pid": 7, "started": 1}
    path = tmp_path / "hearth.json"
    path.write_text(json.dumps({"supervisor": good, "children": [gone, good]}))
    assert read_pid_file(path) == (IdentifiedProcess(7, 1.0), [IdentifiedProcess(7, 1.0)])
