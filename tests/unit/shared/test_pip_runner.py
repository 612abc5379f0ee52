"""Running pip: what is shown of it, that one runs at a time, and that an interrupt ends it all."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

from hearth.shared import pip_runner
from hearth.shared.errors import StartError
from hearth.shared.install_progress import InstallProgress
from hearth.shared.pip_runner import PipStep, lines_and_pauses, only_one
from hearth.shared.processes import process_started
from install_and_run import PROJECT

pytestmark = pytest.mark.process


def step_in(directory: Path, log: TextIO, lock: int) -> PipStep:
    return PipStep(log, lock, directory, os.environ, InstallProgress(directory))


# Does what pip does: says what it installs, and is silent while it unpacks.
PIP = """
printf 'Collecting a\\nDownloading a-1-py3-none-any.whl (5.0 MB)\\nProgress 2500000 of 5000000\\n'
sleep 0.5
printf 'Installing collected packages: a, b\\n'
for name in a b; do
    sleep 0.5
    info=lib/python3/site-packages/$name-1.dist-info
    mkdir -p $info
    printf 'x,,1000000\\n' > $info/RECORD
    printf 'pip\\n' > $info/INSTALLER
done
sleep 0.5
printf 'Successfully installed'
"""


def test_without_a_terminal_a_line_comes_at_each_stage_and_every_so_often(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pip_runner.PLAIN_LINE_S <= 10
    monkeypatch.setattr(pip_runner, "PLAIN_LINE_S", 0.3)
    with (tmp_path / "install.log").open("w") as log, only_one(tmp_path) as lock:
        step_in(tmp_path, log, lock).run(["/bin/sh", "-c", PIP])
    said = capsys.readouterr().err.splitlines()
    for line in ("Fetching: 0 of 1 packages, 2.5 MB, ", "Installing: 1 of 2 packages, 1 MB, "):
        assert any(text.startswith(line) for text in said), said
    assert len(said) >= 5 and not any("\r" in line or "#" in line for line in said)
    logged = (tmp_path / "install.log").read_text()
    assert "Collecting a\n" in logged and logged.endswith("Successfully installed\n")
    assert "Progress" not in logged.split(PIP)[1]


def test_a_terminal_has_a_bar_that_moves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from hearth.shared.pip_runner import *\n"
        "directory, words = Path(sys.argv[1]), ['/bin/sh', '-c', sys.argv[2]]\n"
        "with (directory / 'log').open('w') as log, only_one(directory) as lock:\n"
        "    PipStep(log, lock, directory, os.environ, InstallProgress(directory)).run(words)\n"
    )
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", script, tmp_path, PIP], stderr=theirs) as install:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux: the other side is closed
            while part := os.read(ours, 65_536):
                shown += part
    os.close(ours)
    assert install.returncode == 0
    drawn = shown.decode().split("\r\x1b[K")
    bars = [text for text in drawn if "[" in text]
    assert any("############------------] 1 of 2 packages, 1 MB" in text for text in bars), drawn
    assert any("########################] 2 of 2 packages, 2 MB" in text for text in bars), drawn
    assert drawn[-1] == "" and max(map(len, drawn)) < 80


def test_a_command_is_heard_to_its_end_and_its_pauses_are_told() -> None:
    command = ["/bin/sh", "-c", "printf 'a\\nb'; sleep 0.5; printf 'c\\n\\303\\nlast'"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        lines = list(lines_and_pauses(process.stdout.fileno(), 0.1))
    assert [line for line in lines if line] == ["a\n", "bc\n", "\ufffd\n", "last\n"]
    assert 2 <= lines.count("") <= 10


def test_a_failed_command_shows_its_last_20_lines_and_where_the_log_is(tmp_path: Path) -> None:
    with (tmp_path / "install.log").open("w") as log, only_one(tmp_path) as lock:
        step = step_in(tmp_path, log, lock)
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
from hearth.shared.install_progress import InstallProgress
from hearth.shared.pip_runner import only_one, PipStep
directory = Path(sys.argv[1])
def run(arguments):
    for number in (2, 15):
        install_and_run.signal.signal(number, install_and_run.on_signal)
    with (directory / "log").open("w") as log, only_one(directory) as lock:
        script = "echo $$ > pids; sleep 60 & echo $! >> pids; echo Collecting x; wait"
        progress = InstallProgress(directory)
        PipStep(log, lock, directory, os.environ, progress).run(["/bin/sh", "-c", script])
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
        assert install.stderr is not None
        assert any("Fetching: 0 of 1 packages" in line for line in install.stderr)
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
