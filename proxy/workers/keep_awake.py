"""Keeps a Mac from falling asleep by itself while requests run, with macOS's `caffeinate`.

Only clients' requests count; a prefill in idle time may wait until the machine wakes. Closing the
lid and the menu's Sleep still put the Mac to sleep.
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
# Between two requests an agent runs its tools, whose time limit is 120 s in most agents.
# An untouched Mac would sleep meanwhile.
GRACE_S: Final = 180.0


class KeepAwake:
    """Holds one `caffeinate` from a request's start until GRACE_S after the last one's end.

    Owner: the event loop; starting and killing the process take milliseconds. Invariants: at most
    one `caffeinate` runs, each is reaped, and none outlives this process (`-w`), however it ends.
    """

    def __init__(self, platform: str = sys.platform) -> None:
        """On systems other than macOS, the class does nothing."""
        self._is_on = platform == "darwin"
        self._open = 0  # open requests
        self._process: subprocess.Popen[bytes] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._has_failed = False

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Keep the machine awake inside the `with` block and for GRACE_S after it."""
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
        """Let the machine sleep again: this server stops."""
        self._is_on = False
        self._let_go()

    def _hold(self) -> None:
        """Start `caffeinate` unless one runs; replace one that has ended by itself."""
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
                    start_new_session=True,  # Ctrl-C must not reach `caffeinate`
                )
            except OSError as error:
                self._warn(f"cannot be started: {error.strerror}")

    def _let_go(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is not None:
            self._warn(f"ended by itself with {process.returncode}")
        process.kill()  # `caffeinate` has nothing to clean up
        process.wait()

    def _warn(self, what: str) -> None:
        """Log the failure once, not again at each request."""
        if not self._has_failed:
            log.warning(
                "%s %s. This Mac may fall asleep amid a request: set `sudo pmset sleep 0`.",
                COMMAND,
                what,
            )
        self._has_failed = True
