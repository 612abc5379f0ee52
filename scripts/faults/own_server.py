"""Starts and ends a Hearth server for a script, and watches its processes and their memory."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from aiohttp.test_utils import unused_port

from hearth.commands.bench.servers.started_server import _runs
from hearth.shared.linux_environment import openblas_environment
from hearth.shared.paths import PROJECT_DIR
from scripts.docs.settings_table import example_lines

READY_S_MAX: Final = 120.0
ANSWER_S_MAX: Final = 15.0
END_S_MAX: Final = 20.0  # until a server that does not end is killed
MB: Final = 1_000_000
MODEL_ID: Final = "m"
FOLLOWER: Final = "hearth.worker.ranks.follower_main"
LAUNCH: Final = """
import sys
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", "{}"]))
"""


class ServerError(Exception):
    """The server does not start, or does not tell what it must; the text says why."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds at a moment."""

    role: str
    rss: int  # bytes
    files: int
    threads: int


class OwnServer:
    """One `python -m hearth.proxy.main` on a free port, in a directory of its own.

    Every process that it was seen to have is remembered, for none may outlive it.
    """

    def __init__(
        self, settings: Mapping[str, str], worker: str = "", project: Path = PROJECT_DIR
    ) -> None:
        """`worker` names a module that runs the workers instead of their own."""
        self.port = unused_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.directory = Path(tempfile.mkdtemp(prefix="hearth-"))
        self.log = self.directory / "log"
        (self.directory / "kv").mkdir(mode=0o700)
        self._key = {"Authorization": f"Bearer {settings.get('PROXY_API_KEY', '')}"}
        self._run = partial(
            subprocess.Popen,
            [
                sys.executable,
                *(["-c", LAUNCH.format(worker)] if worker else ["-m", "hearth.proxy.main"]),
            ],
            cwd=project,
            env={
                **os.environ,
                **openblas_environment(os.environ),
                # The defaults, whatever a developer's .env says.
                **dict(line.split("=", 1) for line in example_lines()[1::2]),
                "PROXY_PORT": str(self.port),
                "RUN_DIR": str(self.directory / "run"),
                "LOG_ROOT": str(self.directory / "logs"),
                "KV_CACHE_DIR": str(self.directory / "kv"),
                "DOCTOR": "off",
                "PROXY_MODEL_ID": MODEL_ID,
                "PRESSURE_FILE": str(self.directory / "pressure"),  # of broken_worker
                "SLOW_DISK_FILE": str(self.directory / "slow-disk"),  # likewise
                "FAKE_WORKER_LOG": str(self.directory / "worker.log"),  # of the scripted worker
                **settings,
            },
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.process: subprocess.Popen[Any]  # since its start
        self.seen: dict[int, psutil.Process] = {}

    def start(self) -> None:
        """Start it, without waiting."""
        with self.log.open("ab") as log:
            self.process = self._run(stdout=log, stderr=log)

    async def started(self) -> None:
        """Start it and wait until all of its workers are ready.

        Raises:
            ServerError: it ended, or took longer than READY_S_MAX.
        """
        self.start()
        if not await self.until_ready(READY_S_MAX):
            raise ServerError(f"the server is not ready; its log ends:\n{self.log_tail()}")

    async def until_ready(self, wait_s: float) -> bool:
        """Wait until all workers are ready; say whether they came to be."""
        deadline = time.monotonic() + wait_s
        while (
            not (is_ready := (await self.told("/health")).get("status") == "ok")
            and self.process.poll() is None
            and time.monotonic() < deadline
        ):
            await asyncio.sleep(0.1)
        self.look()
        return is_ready

    # ------------------------------------------------------------ its processes

    def look(self) -> list[psutil.Process]:
        """Return the proxy that it has now, and its workers."""
        try:
            proxy = psutil.Process(self.process.pid)
            everyone = (proxy, *proxy.children(recursive=True))
            self.seen |= {process.pid: process for process in everyone}
            return [proxy, *proxy.children()]
        except psutil.NoSuchProcess:
            return []

    def held(self) -> list[Held]:
        """Return what the proxy and its workers hold now, in the order of `look`."""
        found = []
        for number, process in enumerate(self.look()):
            with contextlib.suppress(psutil.NoSuchProcess):
                role, rss = f"worker {number - 1}" if number else "proxy", process.memory_info().rss
                found.append(Held(role, rss, process.num_fds(), process.num_threads()))
        return found

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the first worker's ranks, in their order."""
        return [
            each
            for worker in self.look()[1:2]
            for each in (worker, *worker.children(recursive=True))
            if each is worker or FOLLOWER in each.cmdline()
        ]

    def left(self) -> list[int]:
        """Return the processes of all its starts that run."""
        return [pid for pid, process in self.seen.items() if _runs(process)]

    def stop(self) -> tuple[int, float]:
        """End it as its user would; return its exit code and the seconds that took."""
        self.look()
        began = time.monotonic()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S_MAX)
        self.process.kill()  # of no effect where it has ended
        return self.process.wait(), time.monotonic() - began

    def close(self, *, keeps: bool = False) -> None:
        """End whatever is left of it, and remove its directory unless it `keeps` that."""
        self.look()
        for pid in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                self.seen[pid].kill()
        self.process.wait()
        if not keeps:
            shutil.rmtree(self.directory, ignore_errors=True)

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    # ------------------------------------------------------------ what it tells

    async def told(self, path: str, method: str = "GET") -> dict[str, Any]:
        """Return the JSON that is answered at `path`; {} while nothing answers."""
        try:
            async with (
                asyncio.timeout(ANSWER_S_MAX),
                aiohttp.request(
                    method, self.url + path, headers=self._key, raise_for_status=True
                ) as reply,
            ):
                return dict(await reply.json())
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return {}


def drafts_line(workers: Sequence[Mapping[str, Any]]) -> str:
    """Return what rows of `/v1/cache` say was drafted; with 0 a check of drafts tells nothing."""
    sources = [row.get("speculation", {}).get("by_source", {}).values() for row in workers]
    drafted, accepted = (
        sum(told[name] for rows in sources for told in rows) for name in ("drafted", "accepted")
    )
    return f"{drafted:,} tokens were drafted, {accepted:,} of them accepted"
