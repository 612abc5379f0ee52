"""The steps of an install: one at a time, and an interrupt ends what runs."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

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


@pytest.mark.parametrize("attempt", range(2))
def test_an_interrupt_amid_the_start_of_pip_ends_it_too(attempt: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITING, str(tmp_path), "kill -TERM $PPID"]
    assert subprocess.run(command, cwd=PROJECT, check=False, timeout=30).returncode == 143
    assert process_started(int((tmp_path / "pid").read_text())) is None


def test_the_default_model_is_fetched_once_whether_it_is_given_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[list[str]] = []

    def take(command: list[str], lock: int) -> NoReturn:
        steps.append(command[1:])
        raise Stop("Installing failed")

    install_and_run.write_stamp(tmp_path, {"extras": ["vision"]})
    monkeypatch.setattr(install_and_run, "step", take)
    monkeypatch.setattr(install_and_run, "output_of", lambda command: "smollm2")
    for _ in range(2):
        install_and_run.fetch_model(tmp_path)
    assert steps == [["-P", "-m", "hearth.commands.main", "pull", "smollm2"]]
    assert f"Fetch it later: '{tmp_path}/bin/hearth' pull" in capsys.readouterr().err


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
