"""The steps of an install: one at a time, and an interrupt ends what runs."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import install_and_run
from hearth.shared.processes import process_started
from install_and_run import PROJECT, Stop, only_one

pytestmark = pytest.mark.process


WAITING = """
import sys
from pathlib import Path
import install_and_run
directory = Path(sys.argv[1])
def run(arguments):
    for number in (2, 15):
        install_and_run.signal.signal(number, install_and_run.on_signal)
    with install_and_run.only_one(directory) as lock:
        script = f"echo $$ > pid; {sys.argv[2]}; exec sleep 60"
        install_and_run.step(["/bin/sh", "-c", f"cd '{directory}'; {script}"], lock)
install_and_run.run = run
sys.exit(install_and_run.main([]))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_install_ends_pip(number: int, status: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path), "echo Collecting x"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=PROJECT, stderr=pipe, text=True) as install:
        assert install.stderr is not None
        assert any("Collecting x" in line for line in install.stderr)
        pid = int((tmp_path / "pid").read_text())
        install.send_signal(number)
        assert install.wait(30) == status, "not after the 60 s that it would take"
        assert "Interrupted. Run the same command again" in install.stderr.read()
    assert process_started(pid) is None


@pytest.mark.parametrize("attempt", range(10))
def test_an_interrupt_amid_the_start_of_pip_ends_it_too(attempt: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path), "kill -TERM $PPID"]
    assert subprocess.run(command, cwd=PROJECT, check=False, timeout=30).returncode == 143
    assert process_started(int((tmp_path / "pid").read_text())) is None


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """Return what starts an install whose .venv is there, and gives the steps that it took."""

    def start(*extras: str, model: str = "smollm2", is_given: bool = True) -> list[list[str]]:
        stamp = install_and_run.read_stamp(tmp_path) or {"extras": ["vision", *extras]}
        install_and_run.write_stamp(tmp_path, stamp)
        steps: list[list[str]] = []

        def take(command: list[str], lock: int) -> None:
            steps.append(command[1:])
            if not is_given:
                raise Stop("Installing failed")

        monkeypatch.setattr(install_and_run, "step", take)
        monkeypatch.setattr(install_and_run, "output_of", lambda command: model)
        install_and_run.fetch_model(tmp_path)
        return steps

    return start


PULL = ["-P", "-m", "hearth.commands.main", "pull", "smollm2"]


def test_the_default_model_is_fetched_once(installed: Callable[..., list[list[str]]]) -> None:
    assert installed() == [PULL]
    assert installed() == []


def test_an_install_goes_on_without_the_model_and_asks_for_it_no_second_time(
    installed: Callable[..., list[list[str]]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert installed(is_given=False) == [PULL]
    said = capsys.readouterr().err
    assert "goes on without smollm2" in said and f"'{tmp_path}/bin/hearth' pull smollm2" in said
    assert installed(is_given=False) == []


def test_no_model_is_a_word_that_venv_keeps(
    installed: Callable[..., list[list[str]]], tmp_path: Path
) -> None:
    assert installed("no-model") == []
    assert "no-model" in install_and_run.wanted_stamp(tmp_path, [], "3.12")["extras"]


def test_an_interrupted_fetch_is_begun_again(
    installed: Callable[..., list[list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(command: list[str], lock: int) -> None:
        raise KeyboardInterrupt(signal.SIGINT)

    install_and_run.write_stamp(tmp_path, {"extras": []})
    monkeypatch.setattr(install_and_run, "step", interrupted)
    monkeypatch.setattr(install_and_run, "output_of", lambda command: "smollm2")
    with pytest.raises(KeyboardInterrupt):
        install_and_run.fetch_model(tmp_path)
    assert installed() == [PULL]


def test_a_second_install_in_the_same_directory_waits_for_the_first(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from install_and_run import only_one\n"
        "with only_one(Path(sys.argv[1])): print('mine', flush=True)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    pipe = subprocess.PIPE
    with only_one(tmp_path):
        second = subprocess.Popen(command, cwd=PROJECT, stdout=pipe, stderr=pipe, text=True)
        assert second.stderr and "waiting for it" in second.stderr.readline()
        assert second.poll() is None
    with second:
        assert second.stdout and second.stdout.read() == "mine\n"
    assert list(tmp_path.iterdir()) == []
