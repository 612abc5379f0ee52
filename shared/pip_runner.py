"""Runs pip for install_and_run.py: one install at a time, its output in brief, its end complete.

Standard library only: it runs before anything is installed.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from hearth.shared.errors import StartError

_LOG_TAIL_LINES = 20
_SESSION_WAIT_S = 1.2  # after each of three signals


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[int]:
    """Hold `directory` locked, waiting for whoever installs there now. Leaves no file behind."""
    lock = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"Another install is at work in {directory}; waiting for it.", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


class PipStep:
    """Runs the commands of an install: everything into the log, in brief to the terminal.

    `lock` is open in the commands too, so that one that outlives us keeps others waiting.
    """

    def __init__(self, log: TextIO, lock: int, directory: Path, environ: Mapping[str, str]) -> None:
        self.log = log
        self._lock = lock
        self._directory = directory
        self._environ = environ
        self._phase = ""

    def run(self, command: list[str]) -> None:
        """Run `command`; if it is interrupted, end all of its processes.

        Raises:
            StartError: it failed.
        """
        print("$", *command, file=self.log, flush=True)
        process = subprocess.Popen(
            command,
            cwd=self._directory,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[self._lock],
            start_new_session=True,
        )
        assert process.stdout is not None
        with process.stdout:
            try:
                for line in process.stdout:
                    self._take(line.decode("utf-8", "replace"))
                status = process.wait()
            except BaseException:
                end_session(process)
                raise
            finally:
                self._show("", "")
        if status:
            raise StartError(self._failure(command, status))

    def _take(self, line: str) -> None:
        self.log.write(line)
        self.log.flush()
        found = condensed(line)
        if found:
            self._show(*found)

    def _show(self, phase: str, detail: str) -> None:
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns
            print("\r\x1b[K" + detail[: columns - 1], end="", file=sys.stderr, flush=True)
        elif phase and phase != self._phase:
            print(phase, file=sys.stderr, flush=True)
        self._phase = phase or self._phase

    def _failure(self, command: list[str], status: int) -> str:
        self.log.flush()
        lines = Path(self.log.name).read_text(encoding="utf-8").splitlines()[-_LOG_TAIL_LINES:]
        tail = "\n".join("  " + line for line in lines)
        return (
            f"Installing failed: {' '.join(command[1:4])} ended with status {status}. The last "
            f"lines of {self.log.name}:\n{tail}\nRun the same command again to go on from here."
        )


def condensed(line: str) -> tuple[str, str] | None:
    """Return the phase and the news in a line of pip's output; None where there is no news."""
    words = line.split()
    if words[:3] == ["Installing", "collected", "packages:"]:
        text = f"Installing packages ({len(words) - 3})"
        return text, text + " (a minute or so)"
    collecting = "Collecting and downloading packages"
    if words[:1] in (["Collecting"], ["Downloading"]):
        return collecting, " ".join(words[:4])
    if words[:3] == ["Requirement", "already", "satisfied:"]:
        return collecting, "Found " + " ".join(words[3:4])
    if words[:2] == ["Using", "cached"]:
        return collecting, "Found " + " ".join(words[2:3])
    if words[:2] == ["Building", "wheel"]:
        return "Building packages", " ".join(words)
    return None


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End `process` and all that it started: kindly, so that pip removes its temporary files."""
    for number in map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)):
        deadline = time.monotonic() + _SESSION_WAIT_S
        while time.monotonic() < deadline:
            process.poll()  # reaps it: the group lives on while one of its processes does
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):  # macOS: a group of zombies only
                return
            number = 0  # from here on it only asks
            time.sleep(0.02)
