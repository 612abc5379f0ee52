"""Keeps a Mac from falling asleep by itself while requests run, by macOS's `caffeinate`.

Only requests of clients count: what is prefilled in idle time may wait for the machine's wake. A
closed lid and the menu's Sleep still put it to sleep.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from subprocess import DEVNULL
from typing import Final

log = logging.getLogger(__name__)

COMMAND: Final = "caffeinate"
# Between two requests an agent runs its tools: a command has 120 s by default in most agents, and
# a Mac that nobody has touched meanwhile sleeps as soon as it may.
GRACE_S: Final = 180.0


class KeepAwake:
    """Holds one `caffeinate` from a request's start until GRACE_S after the last one's end.

    Owner: the event loop, which starting and killing it take milliseconds. Invariants: there is one
    process at most, each is waited for, and none outlives this process (`-w`), however that ends.
    """

    def __init__(self, platform: str = sys.platform) -> None:
        """Nothing is done but on macOS."""
        self._is_on = platform == "darwin"
        self._open = 0  # requests
        self._process: subprocess.Popen[bytes] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._has_failed = False

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Hold the machine awake within, and for a while after."""
        self._open += 1
        if self._is_on:
            self._hold()
        try:
            yield
        finally:
            self._open -= 1
            assert self._open >= 0, self._open
            if not self._open and self._process is not None:
                self._grace = asyncio.get_running_loop().call_later(GRACE_S, self._let_go)

    def close(self) -> None:
        """Let the machine sleep: this server stops."""
        self._is_on = False
        self._let_go()

    def _hold(self) -> None:
        """Have one `caffeinate` run; one that has ended by itself is replaced."""
        if self._process is not None and self._process.poll() is not None:
            self._let_go()
        if self._grace is not None:
            self._grace.cancel()
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    (COMMAND, "-i", "-w", str(os.getpid())),
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=DEVNULL,
                    start_new_session=True,  # Ctrl-C is ours alone
                )
            except OSError as error:
                self._warn(f"cannot be started: {error.strerror}")

    def _let_go(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is not None:
            self._warn(f"ended by itself with {process.returncode}")
        process.kill()  # it has nothing to clean up, and this cannot take long
        process.wait()

    def _warn(self, what: str) -> None:
        """Say once that it fails: each request would tell it again."""
        if not self._has_failed:
            log.warning(
                "%s %s. This Mac may fall asleep amid a request: set `sudo pmset sleep 0`.",
                COMMAND,
                what,
            )
        self._has_failed = True
