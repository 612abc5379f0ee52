"""Starts a module as N processes of one MLX ring on loopback, and ends them all with the first."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from scripts.fixtures.fixture_cache import PROJECT_DIR, mlx_environment

POLL_S: Final = 0.05


class RingError(Exception):
    """A rank failed, or did not end in time."""


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody holds at this moment."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def run_ring(commands: Sequence[Sequence[str]], directory: Path, wait_s: float) -> None:
    """Run each of `commands`, arguments of Python, as the rank of its place, until all ended.

    `directory` is where the ring's host file and the ranks' logs are written.

    Raises:
        RingError: one ended with a status other than 0, or not within `wait_s`. All are ended.
    """
    directory.mkdir(parents=True, exist_ok=True)
    hosts = directory / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(len(commands))]))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, command in enumerate(commands):
            environment = mlx_environment()
            if len(commands) > 1:
                environment |= {"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)}
            log = directory / f"rank-{rank}.log"
            with log.open("wb") as file:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *command],
                        cwd=PROJECT_DIR,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                    )
                )
        _wait(ranks, directory, wait_s)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], directory: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while any(process.poll() is None for process in ranks):
        for rank, process in enumerate(ranks):
            if process.poll():
                said = (directory / f"rank-{rank}.log").read_text()[-2000:]
                raise RingError(f"rank {rank} ended with {process.returncode}: {said}")
        if time.monotonic() > deadline:
            raise RingError(f"{len(ranks)} ranks did not end in {wait_s} s")
        time.sleep(POLL_S)
    if failed := [rank for rank, process in enumerate(ranks) if process.returncode]:
        raise RingError(f"ranks {failed} failed, see {directory}")
