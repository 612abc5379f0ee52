"""Starts a server that `hearth bench` measures, and ends it: as its user would, or by force.

It runs in a home of its own that a later start finds again, in an environment of which nothing of
the user's settings is left, beside the meter that counts what it really reads. It is ready when it
has answered a request, not when it says so: some say so while they still load.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import aiohttp
import psutil

from hearth.commands.bench.server import KEY, Memory, Meter, Server
from hearth.commands.bench.servers.install_server import program_of
from hearth.commands.bench.servers.meter_file import (
    Layers,
    attention_layers,
    layers_of_prompt,
    load_layers,
    meter_of,
    read_counts,
    save_layers,
)
from hearth.commands.bench.servers.server_environment import (
    arguments_of,
    environment_of,
    placeholders,
    without_paths,
)
from hearth.commands.bench.servers.server_guard import ServerGuard, is_same, metered
from hearth.commands.replay.player import Row, Target, replay
from hearth.commands.replay.traces import CHAT_PATH, Captured
from hearth.commands.stream_client import body_of
from hearth.shared.paths import env_file

__all__ = ["ServerStartError", "StartedServer", "started"]

START_WAIT_S_MAX: Final = 900.0  # a large model from a slow disk
STOP_WAIT_S_MAX: Final = 60.0  # it may write what it keeps, or end a chunk on a GPU
KILL_WAIT_S_MAX: Final = 10.0
ANSWER_WAIT_S_MAX: Final = 300.0  # to its first requests: some fail and never answer
REQUEST_WAIT_S_MAX: Final = 3600.0
POLL_S: Final = 0.05
REST_S: Final = 0.4  # a meter that stands still for so long is that of a server at rest
REST_WAIT_S_MAX: Final = 10.0
READY: Final = frozenset(("ok", "healthy", "ready"))  # as the servers' /health words it
LOG_LINES: Final = 20
LOG_BYTES_MAX: Final = 64 * 1024  # of its end, which is read
REASON_CHARS_MAX: Final = 200
FOLDER_PREFIX: Final = "hearth-bench-"  # of temporary folders, in which homes lie
COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
NAMES_ERROR: Final = re.compile(r"[\w.]*(Error|Exception)\b")
HELLO: Final = "Hi"
WORDS: Final = "Metering begins. " + " ".join(f"word{number}" for number in range(150))


class ServerStartError(Exception):
    """A server does not run, or not this model; the text is the end of what it said."""

    @property
    def reason(self) -> str:
        """Return the last line that names an error, else the last one that says anything."""
        lines = [line.strip() for line in COLOUR.sub("", str(self)).splitlines() if line.strip()]
        named = [line for line in lines if NAMES_ERROR.match(line)]
        return (named or lines or [""])[-1][:REASON_CHARS_MAX]


class StartedServer:
    """A server that this process has started, or one of somebody else's that is asked by URL.

    Every process that it was seen to have is remembered, for none may outlive it.
    Owner: the event loop.
    """

    def __init__(
        self,
        target: Target,
        directory: Path | None = None,
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self.target = target
        self.is_metered = False
        self.start_s = 0.0  # from the start of its first process to its first answer
        self._directory = directory
        self._process = process
        self._guard: ServerGuard | None = None
        # Noted at once: one that has ended and been waited for is found by nobody.
        self._seen = {} if process is None else {process.pid: psutil.Process(process.pid)}
        self._layers: Layers = {}

    @property
    def directory(self) -> Path | None:
        return self._directory

    def meter(self) -> Meter | None:
        """Return what its processes have computed; None where they are not metered."""
        if self._directory is None or not self.is_metered:
            return None
        return meter_of(read_counts(self._directory / "meter"), self._layers)

    def pids(self) -> list[int]:
        """Return its processes that run, its first one first."""
        if self._process is None:
            return []
        self._look()
        return [pid for pid, each in self._seen.items() if _runs(each)]

    def _look(self) -> None:
        assert self._directory is not None
        for process in [*self._seen.values()]:
            with contextlib.suppress(psutil.Error):
                for child in process.children(recursive=True):
                    self._seen.setdefault(child.pid, child)
        # Those whose parent has ended, too; not what has only the number of one that has ended.
        for pid, known_s in metered(self._directory / "meter"):
            if pid not in self._seen:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    if is_same(process.create_time(), known_s):
                        self._seen[pid] = process

    # ------------------------------------------------------------ its end

    async def stop(self) -> None:
        """End it as its user would; what does not end in time, and what it left, is killed."""
        if self._process is None:
            return
        self.pids()
        if self._process.poll() is None:
            self._process.terminate()
            if await self._until(lambda: not _is_left(self._process), STOP_WAIT_S_MAX):
                # Its workers may write what they keep after it has ended.
                await self._until(lambda: not self.pids(), KILL_WAIT_S_MAX)
        await self.kill()

    def guard(self, directory: Path) -> None:
        """Have it ended, and `directory` removed, should this process be killed meanwhile."""
        assert self._process is not None and self._directory is not None
        self._guard = ServerGuard(self._process.pid, self._directory, directory)

    async def kill(self) -> None:
        """Kill all its processes at once, as a crash or a loss of power would."""
        if self._process is None:
            return
        deadline = time.monotonic() + KILL_WAIT_S_MAX
        while time.monotonic() < deadline:
            left = self.pids()
            for pid in left:
                with contextlib.suppress(psutil.Error):
                    self._seen[pid].kill()
            if self._process.poll() is not None and not left:
                if self._guard is not None:
                    self._guard.release()
                    self._guard = None
                return
            await asyncio.sleep(POLL_S)

    async def _until(self, is_so: Callable[[], bool], wait_s: float) -> bool:
        deadline = time.monotonic() + wait_s
        while not (found := is_so()) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return found

    # ------------------------------------------------------------ its beginning

    async def begin(self, log: Path, began_s: float) -> None:
        """Wait until it has answered.

        Raises:
            ServerStartError: it has ended, or takes too long, or answers with an error.
        """
        await self._until_healthy(log)
        row = await self._ask(HELLO)
        if not row.outcome.is_answered:
            raise ServerStartError(f"{_tail(log)}\nit does not answer: {row.outcome.error}")
        self.start_s = time.perf_counter() - began_s
        await self.rest()

    async def _until_healthy(self, log: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_WAIT_S_MAX
        async with aiohttp.ClientSession(self.target.base_url) as session:
            while time.monotonic() < deadline and self._process.poll() is None:
                if await _is_healthy(session):
                    return
                await asyncio.sleep(POLL_S)
        how = "takes too long to start" if self._process.poll() is None else "has ended"
        raise ServerStartError(f"it {how}:\n{_tail(log)}")

    async def calibrate(self, model: Path) -> None:
        """Find what one token counts, once for a home: a later start may not read it whole."""
        assert self._directory is not None
        meter, kept = self._directory / "meter", self._directory / "meter-layers.json"
        self._layers = load_layers(kept)
        if not self._layers:
            before = read_counts(meter)
            row = await self._ask(WORDS)
            await self.rest()
            told = row.tokens.prompt if row.tokens is not None else 0
            layers = attention_layers(model)
            self._layers = layers_of_prompt(before, read_counts(meter), told, layers)
            save_layers(self._layers, kept)
        self.is_metered = bool(self._layers)

    async def rest(self) -> None:
        """Wait until it computes nothing; REST_WAIT_S_MAX at most."""
        assert self._directory is not None
        last, since = read_counts(self._directory / "meter"), time.monotonic()
        deadline = since + REST_WAIT_S_MAX
        while time.monotonic() < min(since + REST_S, deadline):
            await asyncio.sleep(POLL_S)
            now = read_counts(self._directory / "meter")
            if now != last:
                last, since = now, time.monotonic()

    async def _ask(self, text: str) -> Row:
        body = {"messages": [{"role": "user", "content": text}]}
        asked = Captured("start", "chat", CHAT_PATH, {}, body, "", 0.0, 0.0)
        target = replace(self.target, tokens_max=1, timeout_s=ANSWER_WAIT_S_MAX)
        rows, _ = await replay([asked], target)
        return rows[0]


@contextlib.asynccontextmanager
async def started(
    server: Server,
    model: Path,
    home: Path,
    memory: Memory,
    memory_mb: int,
    tokens_max: int = 1,
) -> AsyncIterator[StartedServer]:
    """Run `server` for the length of the block; `home` is all that a later start finds again.

    Raises:
        ServerStartError: it does not run here, or not this model.
    """
    target = Target(
        server.url,
        KEY,
        server.model,
        tokens_max=tokens_max,
        timeout_s=REQUEST_WAIT_S_MAX,
        is_chat_only=server.is_chat_only,
        extra={**server.extra, **server.memory_extra.get(memory, {})},
    )
    if server.url:
        yield StartedServer(target)
        return
    port = _free_port()
    given = placeholders(model, port, home, memory_mb)
    target = replace(
        target, base_url=f"http://127.0.0.1:{port}", model=server.model.format(**given)
    )
    meter, log = home / "meter", home / "server.log"
    shutil.rmtree(meter, ignore_errors=True)  # of an earlier start
    meter.mkdir(mode=0o700, parents=True)
    began_s = time.perf_counter()
    running = StartedServer(target, home, _spawn(server, memory, given, log))
    try:
        # All homes of a visit lie in one folder.
        is_visit = home.parent.name.startswith(FOLDER_PREFIX)
        running.guard(home.parent if is_visit else home)
        try:
            await running.begin(log, began_s)
            await running.calibrate(model)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerStartError(f"{_tail(log)}\nit does not answer: {error!r}") from error
    except ServerStartError as error:
        await running.kill()
        raise ServerStartError(without_paths(str(error), model, home)) from error.__cause__
    except BaseException:
        await running.kill()
        raise
    try:
        yield running
    finally:
        await running.stop()


# ---------------------------------------------------------------- the process


def _spawn(
    server: Server, memory: Memory, given: Mapping[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    program = program_of(server)
    if program is None:
        raise ServerStartError(f"{server.name} is not installed")
    if any("{models_dir}" in each for each in server.arguments):
        link = Path(given["models_dir"]) / given["model_name"]
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(given["model"], target_is_directory=True)
    words: Sequence[str] = [each.format(**given) for each in arguments_of(server, memory)]
    environment = environment_of(server, memory, given, os.environ, env_file())
    log.unlink(missing_ok=True)
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
        return subprocess.Popen(
            [program, *words],
            cwd=given["dir"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C ends the bench, which then ends it
        )


async def _is_healthy(session: aiohttp.ClientSession) -> bool:
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError, RecursionError):
        async with session.get(
            "/health", timeout=aiohttp.ClientTimeout(5), allow_redirects=False
        ) as response:
            if response.status == 404:
                return await _lists_models(session)
            told = json.loads(await body_of(response))
            status = told.get("status", "") if isinstance(told, dict) else ""
            return str(status).lower() in READY
    return False


async def _lists_models(session: aiohttp.ClientSession) -> bool:
    async with session.get(
        "/v1/models", timeout=aiohttp.ClientTimeout(5), allow_redirects=False
    ) as response:
        return bool(response.status == 200)


def _is_left(process: "subprocess.Popen[bytes] | None") -> bool:
    return process is not None and process.poll() is None


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES_MAX))
        text = file.read(LOG_BYTES_MAX).decode(errors="replace")
    return "\n".join(text.splitlines()[-LOG_LINES:])
