"""Starts and ends a Hearth server for a script, and watches its processes and their memory."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from hearth.shared.openblas_preload import openblas_environment
from hearth.shared.settings_from_env import PROJECT_DIR, example_lines
from scripts.chaos.judge_replies import Reply, reply_of

READY_S_MAX: Final = 120.0
END_S_MAX: Final = 20.0  # until a server that does not end is killed
BUFFER_BYTES: Final = 65_536
MB: Final = 1_000_000
LAUNCH: Final = """
import sys
from hearth.proxy.main import end, main
end(main([sys.executable, "-m", "{}"]))
"""


class ServerError(Exception):
    """The server does not start, or does not tell what it must; the text says why."""


class OwnServer:
    """One `python -m hearth.proxy.main` on a free port, in a directory of its own.

    Every process that it was seen to have is remembered, for none may outlive it.
    """

    def __init__(
        self, settings: Mapping[str, str], command: Sequence[str] = (), worker: str = ""
    ) -> None:
        """`command` is put before the interpreter's, and must become it (as setpriv does).

        `worker` names a module that runs the workers instead of their own.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.directory = Path(tempfile.mkdtemp(prefix="hearth-"))
        self.log = self.directory / "log"
        self.kv_dir = self.directory / "kv"
        self.kv_dir.mkdir(mode=0o700)
        defaults = dict(line.split("=", 1) for line in example_lines()[1::2])
        self._environment = {
            **os.environ,
            **openblas_environment(os.environ),
            **defaults,  # whatever a developer's .env says
            "PROXY_PORT": str(self.port),
            "RUN_DIR": str(self.directory / "run"),
            "LOG_ROOT": str(self.directory / "logs"),
            "KV_CACHE_DIR": str(self.kv_dir),
            "DOCTOR": "off",
            **settings,
        }
        run = ["-c", LAUNCH.format(worker)] if worker else ["-m", "hearth.proxy.main"]
        self._command = [*command, sys.executable, *run]
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: dict[int, psutil.Process] = {}
        self.helpers: dict[int, psutil.Process] = {}  # that workers have started

    def set(self, name: str, value: str) -> None:
        """Set a variable of the environment that it is started in."""
        self._environment[name] = value

    @property
    def instance_dir(self) -> Path:
        return self.directory / "run" / str(self.port)

    def start(self) -> None:
        """Start it, without waiting."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                cwd=PROJECT_DIR,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

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
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                return False
            if (await self.health()).get("status") == "ok":
                self.look()
                return True
            await asyncio.sleep(0.1)
        return False

    # ------------------------------------------------------------ its processes

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def look(self) -> list[psutil.Process]:
        """Return the proxy that it has now, and its workers.

        The processes of the workers' grammars come and go with answers: they are only noted.
        """
        try:
            proxy = psutil.Process(self.pid)
            workers = proxy.children()
            helpers = set(proxy.children(recursive=True)) - set(workers)
        except psutil.NoSuchProcess:
            return []
        for process in (proxy, *workers):
            self.seen.setdefault(process.pid, process)
        self.helpers.update({process.pid: process for process in helpers})
        return [proxy, *workers]

    def left(self) -> list[int]:
        """Return the processes of all its starts that run."""
        everyone = self.seen | self.helpers
        return [pid for pid, process in everyone.items() if is_alive(process)]

    def stop(self) -> tuple[int, float]:
        """End it as its user would; return its exit code and the seconds that took."""
        assert self.process is not None
        self.look()
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return code, time.monotonic() - began

    def close(self, *, keeps: bool = False) -> None:
        """End whatever is left of it, and remove its directory unless it `keeps` that."""
        self.look()
        for pid in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                (self.seen | self.helpers)[pid].kill()
        if self.process is not None:
            self.process.wait()
        if not keeps:
            shutil.rmtree(self.directory, ignore_errors=True)

    def log_tail(self, lines: int = 20) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    # ------------------------------------------------------------ what it tells

    async def health(self) -> dict[str, Any]:
        """GET /health; {} while nothing answers."""
        return await self._json("GET", "/health")

    async def cache(self, *, clears: bool = False) -> dict[str, Any]:
        """GET or DELETE /v1/cache; {} while nothing answers."""
        return await self._json("DELETE" if clears else "GET", "/v1/cache")

    async def workers(self) -> list[dict[str, Any]]:
        return list((await self.health()).get("workers", []))

    async def _json(self, method: str, path: str) -> dict[str, Any]:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\n"
            f"Authorization: Bearer {self._environment.get('PROXY_API_KEY', '')}\r\n\r\n"
        )
        reply = await self.ask(head.encode())
        return dict(json.loads(reply.body)) if reply is not None and reply.status == 200 else {}

    async def ask(self, payload: bytes, wait_s: float = 15.0) -> Reply | None:
        """Send bytes and return the answer to them; None where none came."""
        try:
            async with asyncio.timeout(wait_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write(payload)
                    return reply_of(await reader.read())
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None


def is_alive(process: psutil.Process) -> bool:
    """Tell whether a process runs, or is stopped; a zombie only waits for its parent."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def rss_bytes(process: psutil.Process) -> int:
    """Return what a process holds in memory; 0 where it has ended."""
    try:
        return int(process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0
