"""Running pip: what is shown of it, that one runs at a time, and that an interrupt ends it all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hearth.shared.errors import StartError
from hearth.shared.pip_runner import PipStep, condensed, only_one
from hearth.shared.processes import process_started
from install_and_run import PROJECT

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("line", "phase", "detail"),
    [
        ("Collecting mlx-lm<0.33 (from hearth)\n", "Collecting", "Collecting mlx-lm<0.33"),
        ("  Downloading mlx.whl (36.8 MB)\n", "Collecting", "Downloading mlx.whl (36.8 MB)"),
        ("Requirement already satisfied: numpy in x\n", "Collecting", "Found numpy"),
        ("Installing collected packages: a, b\n", "Installing packages (2)", "Installing"),
        ("WARNING: something\n", "", ""),
        ("\n", "", ""),
    ],
)
def test_pip_is_shown_in_brief(line: str, phase: str, detail: str) -> None:
    found = condensed(line)
    assert (found is not None) == bool(phase)
    if found:
        assert found[0].startswith(phase) and found[1].startswith(detail)


def test_a_failed_command_shows_its_last_20_lines_and_where_the_log_is(tmp_path: Path) -> None:
    with (tmp_path / "install.log").open("w") as log, only_one(tmp_path) as lock:
        step = PipStep(log, lock, tmp_path, os.environ)
        with pytest.raises(StartError) as failure:
            step.run(["/bin/sh", "-c", "for i in $(seq 50); do echo line $i; done; exit 3"])
    text = str(failure.value)
    assert "status 3" in text and str(tmp_path / "install.log") in text
    assert "line 31\n" in text and "line 50\n" in text and "line 30\n" not in text
    assert "line 1\n" in (tmp_path / "install.log").read_text()


WAITING = """
import os, sys
from pathlib import Path
import install_and_run
from hearth.shared.pip_runner import only_one, PipStep
directory = Path(sys.argv[1])
def run(arguments):
    for number in (2, 15):
        install_and_run.signal.signal(number, install_and_run.on_signal)
    with (directory / "log").open("w") as log, only_one(directory) as lock:
        script = "echo $$ > pids; sleep 60 & echo $! >> pids; echo Collecting x; wait"
        PipStep(log, lock, directory, os.environ).run(["/bin/sh", "-c", script])
install_and_run.run = run
sys.exit(install_and_run.main([]))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_install_ends_all_that_pip_started(
    number: int, status: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", WAITING, tmp_path]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=PROJECT, stderr=pipe, text=True) as install:
        assert (
            install.stderr and install.stderr.readline() == "Collecting and downloading packages\n"
        )
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        install.send_signal(number)
        assert install.wait(30) == status, "not after the 60 s that it would take"
        assert "Interrupted. Run the same command again" in install.stderr.read()
    assert len(pids) == 2 and [process_started(pid) for pid in pids] == [None, None]


def test_a_second_install_in_the_same_directory_waits_for_the_first(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from hearth.shared.pip_runner import only_one\n"
        "with only_one(Path(sys.argv[1])): print('mine', flush=True)"
    )
    command = [sys.executable, "-c", script, tmp_path]
    pipe = subprocess.PIPE
    with only_one(tmp_path):
        second = subprocess.Popen(command, cwd=PROJECT, stdout=pipe, stderr=pipe, text=True)
        assert second.stderr and "waiting for it" in second.stderr.readline()
        assert second.poll() is None
    with second:
        assert second.stdout and second.stdout.read() == "mine\n"
    assert list(tmp_path.iterdir()) == []
