"""Runs a command in a terminal of its own, types into it, and reads what it writes."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hearth.shared.paths import PROJECT_DIR

WAIT_S = 300.0
ROWS, COLUMNS = 24, 80


@dataclass
class Terminal:
    """A process whose terminal the test types into and reads."""

    process: subprocess.Popen[bytes]
    screen: int
    read: bytearray = field(default_factory=bytearray)

    def type(self, text: str) -> None:
        """Type `text`; "\\r" is the return key, "\\x03" Ctrl-C, "\\x04" Ctrl-D."""
        left = text.encode()
        while left:  # what it echoes is read meanwhile: else both would wait for the other
            self._read(0.0)
            if select.select([], [self.screen], [], 0.1)[1]:
                left = left[os.write(self.screen, left[:256]) :]

    def until(self, text: bytes, after: int = 0) -> int:
        """Wait until `text` is written behind the first `after` bytes; return where it ends."""
        deadline = time.monotonic() + WAIT_S
        while (at := self.read.find(text, after)) < 0:
            assert time.monotonic() < deadline, bytes(self.read)
            self._read(0.1)
        return at + len(text)

    def end(self, number: int) -> int:
        """Send a signal; return the exit status once all that was written is read."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Return the exit status once the process has ended and all that was written is read."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, bytes(self.read)
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.process.returncode

    def _read(self, wait_s: float) -> bool:
        if not select.select([self.screen], [], [], wait_s)[0]:
            return False
        try:
            chunk = os.read(self.screen, 65_536)
        except OSError:  # Linux says so once nobody has the other end open
            return False
        self.read += chunk
        return bool(chunk)


def _take_terminal() -> None:
    """Make stdin the terminal that the process is ruled from, so that Ctrl-C is a signal to it.

    Tests that run in the background of a shell have been told to ignore it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def in_terminal(*command: str, environ: Mapping[str, str] = os.environ) -> Iterator[Terminal]:
    """Run `python -m command` in a terminal of 24 lines; kill it where the block leaves it."""
    screen, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        python_module(*command),
        cwd=PROJECT_DIR,
        env={**environ, "TERM": "xterm", "NO_COLOR": "1"},
        stdin=other,
        stdout=other,
        stderr=other,
        preexec_fn=_take_terminal,
    )
    os.close(other)
    try:
        yield Terminal(process, screen)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(screen)


def python_module(*command: str) -> Sequence[str]:
    return [sys.executable, "-m", *command]
