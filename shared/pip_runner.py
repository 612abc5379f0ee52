"""Runs pip for install_and_run.py: one install at a time, with a bar, its end complete.

Standard library only: it runs before anything is installed.
"""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TextIO

from hearth.shared.errors import StartError
from hearth.shared.install_progress import InstallProgress

TICK_S: Final = 0.2  # a bar in a terminal is drawn anew
PLAIN_LINE_S: Final = 10.0  # without a terminal: a line at least so often
_READ_BYTES: Final = 65_536
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
    """Runs the commands of an install: everything into the log, how far it is to the terminal.

    `lock` is open in the commands too, so that one that outlives us keeps others waiting.
    """

    def __init__(
        self,
        log: TextIO,
        lock: int,
        directory: Path,
        environ: Mapping[str, str],
        progress: InstallProgress,
    ) -> None:
        self.log = log
        self._lock = lock
        self._directory = directory
        self._environ = environ
        self._progress = progress
        self._said: tuple[str, float] = ("", 0.0)  # the stage that was shown last, and when

    def run(self, command: list[str]) -> None:
        """Run `command`; if it is interrupted, end all of its processes.

        Raises:
            StartError: it failed.
        """
        print("$", *command, file=self.log, flush=True)
        process = subprocess.Popen(
            command,
            bufsize=0,
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
                for line in lines_and_pauses(process.stdout.fileno(), TICK_S):
                    self._take(line)
                status = process.wait()
                self._progress.look()
            except BaseException:
                end_session(process)
                raise
            finally:
                if sys.stderr.isatty():
                    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        if status:
            raise StartError(self._failure(command, status))

    def _take(self, line: str) -> None:
        """Take a line of the command's, or "" where it has said nothing for TICK_S."""
        if line and self._progress.take(line):
            self.log.write(line)
            self.log.flush()
        stage, now = self._progress.stage, time.monotonic()
        said_stage, said_at = self._said
        is_terminal = sys.stderr.isatty()
        if stage == said_stage and now - said_at < (TICK_S if is_terminal else PLAIN_LINE_S):
            return
        self._progress.look()
        self._said = (stage, now)
        if is_terminal:
            columns = shutil.get_terminal_size().columns
            print("\r\x1b[K" + self._progress.line(columns), end="", file=sys.stderr, flush=True)
        else:
            print(self._progress.line(), file=sys.stderr, flush=True)

    def _failure(self, command: list[str], status: int) -> str:
        self.log.flush()
        lines = Path(self.log.name).read_text(encoding="utf-8").splitlines()[-_LOG_TAIL_LINES:]
        tail = "\n".join("  " + line for line in lines)
        return (
            f"Installing failed: {' '.join(command[1:4])} ended with status {status}. The last "
            f"lines of {self.log.name}:\n{tail}\nRun the same command again to go on from here."
        )


def lines_and_pauses(descriptor: int, pause_s: float) -> Iterator[str]:
    """Yield each line until the end, and "" whenever there was none for `pause_s`."""
    rest = b""
    while True:
        if not select.select([descriptor], [], [], pause_s)[0]:
            yield ""
            continue
        part = os.read(descriptor, _READ_BYTES)
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.decode("utf-8", "replace") + "\n" for line in whole)
        if not part:
            break
    if rest:
        yield rest.decode("utf-8", "replace") + "\n"


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
