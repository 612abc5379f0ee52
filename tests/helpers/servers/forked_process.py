"""Starts proxies as forks of a process that has imported LiteLLM (`fork_server`)."""

import functools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hearth.proxy.gateway.litellm_app import environment
from hearth.shared.settings_from_env import PROJECT_DIR

CAN_FORK: Final = sys.platform == "linux"  # macOS's frameworks do not bear a fork
PROGRAM: Final = Path(__file__).with_name("fork_server.py")


class ForkedProcess:
    """A process that is no child of ours, with what tests ask of a Popen.

    How it ended is not known: 0 stands for each exit status.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        try:
            self._handle = os.pidfd_open(pid)  # stays its own when another gets its number
        except ProcessLookupError:
            self.returncode = 0

    def poll(self) -> int | None:
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Raises: subprocess.TimeoutExpired: it runs on."""
        if self._ended_within(timeout) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return 0

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended_within(self, wait_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._handle], [], [], wait_s)[0]:
            os.close(self._handle)
            self.returncode = 0
        return self.returncode


@functools.cache
def fork_server() -> "subprocess.Popen[str]":
    """Start the process that forks, once for all tests of this process; it ends with us."""
    return subprocess.Popen(
        [sys.executable, "-P", str(PROGRAM)],
        cwd=PROJECT_DIR,
        env=environment(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def forked(kind: str, what: str, environ: Mapping[str, str], log: Path) -> ForkedProcess:
    """Start what `python kind what` would, for `kind` -m or -c."""
    forker = fork_server()
    assert forker.stdin is not None and forker.stdout is not None
    print(json.dumps([kind, what, dict(environ), str(log)]), file=forker.stdin, flush=True)
    return ForkedProcess(int(forker.stdout.readline()))
