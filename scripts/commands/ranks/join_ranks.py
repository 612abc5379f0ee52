"""Runs `hearth ranks join`: one rank of a server elsewhere, again and again, until a signal.

The rank is a process of its own, which waits for rank 0 and ends with it. Nothing of the model is
loaded before rank 0 is there.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final

from hearth.shared.errors import EXIT_CANNOT_START, StartError
from hearth.shared.paths import env_file
from hearth.shared.settings import Settings, load_settings
from hearth.shared.zmq_transport import RANK_NAME, curve_keys
from hearth.worker.ranks.rank_hosts import check_address
from hearth.worker.ranks.start_ranks import FOLLOWER

WAIT_S_MIN: Final = 0.2
WAIT_S_MAX: Final = 15.0
LONG_S: Final = 60.0  # a rank that lived for so long did not fail at its start
END_WAIT_S: Final = 5.0
LOOK_S: Final = 0.2


def join_for_ever(leader: str, address: str) -> int:
    """Keep one rank running; return 0 after a signal, 78 where none can start as configured."""
    try:
        settings = load_settings(os.environ, env_file())
        endpoint = endpoint_of(leader, settings)
        if address:
            check_address(address, "--address")
        check_rank_keys(settings)
    except StartError as error:
        print(f"hearth ranks join: {error}", file=sys.stderr)
        return EXIT_CANNOT_START
    print(f"A rank of {endpoint}; Ctrl-C ends it.", flush=True)
    command = [*FOLLOWER, "--leader", endpoint, *(["--address", address] if address else [])]
    JoinedRank(command).run()
    return 0


def check_rank_keys(settings: Settings) -> None:
    """Raises: StartError: there are none, or ones that others may have read."""
    curve_keys(settings.curve_keys_dir, RANK_NAME, RANK_NAME)


def endpoint_of(leader: str, settings: Settings) -> str:
    """Return rank 0's endpoint. Raises: StartError: it is no private address with a port."""
    text = leader.removeprefix("tcp://")
    has_port = text.count(":") == 1 or "]:" in text
    host, _, port = text.rpartition(":") if has_port else (text, "", "")
    host = host.removeprefix("[").removesuffix("]")
    check_address(host, "Rank 0's address")
    if port and not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise StartError(f"{leader!r} has no port that could be one: 1 to 65535.")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port or settings.rank_port}"


class JoinedRank:
    """Starts a rank's process anew each time that it ends, until a signal. Main thread."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._is_over = False

    def run(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._stop)
        wait_s = WAIT_S_MIN
        while not self._is_over:
            began = time.monotonic()
            self._run_once()
            wait_s = (
                WAIT_S_MIN if time.monotonic() - began > LONG_S else min(2 * wait_s, WAIT_S_MAX)
            )
            self._wait(wait_s)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_over = True

    def _run_once(self) -> None:
        """Run one rank until it ends, or until a signal ends it."""
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        while process.poll() is None and not self._is_over:
            try:
                process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        process.stdin.close()
        try:
            process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _wait(self, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while not self._is_over and time.monotonic() < deadline:
            time.sleep(LOOK_S)
