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
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import aiohttp
import psutil

from hearth.commands.bench.server import KEY, Memory, Meter, Server
from hearth.commands.bench.servers.meter_file import (
    Layers,
    attention_layers,
    layers_of_prompt,
    meter_of,
    read_counts,
)
from hearth.commands.bench.servers.server_environment import (
    environment_of,
    placeholders,
    program_of,
    without_paths,
)
from hearth.commands.replay.player import Row, Target, replay
from hearth.commands.replay.traces import CHAT_PATH, Captured
from hearth.commands.stream_client import body_of
from hearth.shared.paths import env_file

START_WAIT_S_MAX: Final = 900.0  # a large model from a slow disk
STOP_WAIT_S_MAX: Final = 60.0  # it may write what it keeps, or end a chunk on a GPU
KILL_WAIT_S_MAX: Final = 10.0
ANSWER_WAIT_S_MAX: Final = 300.0  # to its first requests: some fail and never answer
REQUEST_WAIT_S_MAX: Final = 3600.0
POLL_S: Final = 0.05
REST_S: Final = 0.4  # a meter that stands still for so long is that of a server at rest
REST_WAIT_S_MAX: Final = 10.0
READY: Final = frozenset(("ok", "healthy", "ready"))  # as the servers' /health words it
LOG_CHARS: Final = 2_000  # of its end, which is told
COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
HELLO: Final = "Hi"
WORDS: Final = "Metering begins. " + " ".join(f"word{number}" for number in range(150))


class ServerStartError(Exception):
    """A server does not run, or not this model; the text is the end of what it said."""


class StartedServer:
    """A server that this process has started, or one of somebody else's that is asked by URL.

    Every process that it was seen to have is remembered, for none may outlive it.
    Owner: the event loop.
    """

    def __init__(
        self,
        target: Target,
        directory: Path = Path(),
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self.target = target
        self.is_metered = False
        self.start_s = 0.0  # from the start of its first process to its first answer
        self._directory = directory
        self._process = process
        # Noted at once: one that has ended and been waited for is found by nobody.
        self._seen = {} if process is None else {process.pid: psutil.Process(process.pid)}
        self._layers: Layers = {}

    def meter(self) -> Meter | None:
        """Return what its processes have computed; None where they are not metered."""
        if not self.is_metered:
            return None
        return meter_of(read_counts(self._directory / "meter"), self._layers)

    def pids(self) -> list[int]:
        """Return its processes that run, its first one first; none by URL."""
        for process in [*self._seen.values()]:
            with contextlib.suppress(psutil.Error):
                for child in process.children(recursive=True):
                    self._seen.setdefault(child.pid, child)
        return [pid for pid, each in self._seen.items() if _runs(each)]

    # ------------------------------------------------------------ its end

    async def stop(self) -> None:
        """End it as its user would; what does not end in time, and what it left, is killed."""
        process = self._process
        if process is None:
            return
        self.pids()
        if process.poll() is None:
            process.terminate()
            if await _until(lambda: process.poll() is not None, STOP_WAIT_S_MAX):
                # Its workers may write what they keep after it has ended.
                await _until(lambda: not self.pids(), KILL_WAIT_S_MAX)
        await self.kill()

    async def kill(self) -> None:
        """Kill all its processes at once, as a crash or a loss of power would."""
        await _until(self._is_killed, KILL_WAIT_S_MAX)

    def _is_killed(self) -> bool:
        left = self.pids()
        for pid in left:
            with contextlib.suppress(psutil.Error):
                self._seen[pid].kill()
        return (self._process is None or self._process.poll() is not None) and not left

    # ------------------------------------------------------------ its beginning

    async def begin(self, model: Path, log: Path, began_s: float) -> None:
        """Wait until it has answered, then find what one token counts in its meter.

        Raises:
            ServerStartError: it has ended, or takes too long, or answers with an error.
        """
        process = self._process
        assert process is not None
        async with aiohttp.ClientSession(self.target.base_url) as session:
            deadline = time.monotonic() + START_WAIT_S_MAX
            while not await _is_healthy(session):
                if process.poll() is not None or time.monotonic() > deadline:
                    how = "takes too long to start" if process.poll() is None else "has ended"
                    raise ServerStartError(f"it {how}")
                await asyncio.sleep(POLL_S)
        row = await self._ask(HELLO)
        if not row.outcome.is_answered:
            raise ServerStartError(f"it does not answer: {row.outcome.error}")
        self.start_s = time.perf_counter() - began_s
        await self.rest()
        before = read_counts(self._directory / "meter")
        # The port makes it another prompt in each start, which is read whole.
        row = await self._ask(f"{self.target.base_url} {WORDS}")
        await self.rest()
        told = row.tokens.prompt if row.tokens is not None else 0
        after = read_counts(self._directory / "meter")
        self._layers = layers_of_prompt(before, after, told, attention_layers(model))
        self.is_metered = bool(self._layers)

    async def rest(self) -> None:
        """Wait until it computes nothing; REST_WAIT_S_MAX at most."""
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
    server: Server, model: Path, home: Path, memory: Memory, memory_mb: int
) -> AsyncIterator[StartedServer]:
    """Run `server` for the length of the block; `home` is all that a later start finds again.

    Raises:
        ServerStartError: it does not run here, or not this model.
    """
    target = Target(
        server.url,
        KEY,
        server.model,
        tokens_max=1,
        timeout_s=REQUEST_WAIT_S_MAX,
        is_chat_only=server.is_chat_only,
        extra={**server.extra, **server.memory_extra.get(memory, {})},
    )
    if server.url:
        yield StartedServer(target)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    given = placeholders(model, port, home, memory_mb)
    target = replace(target, base_url=f"http://127.0.0.1:{port}")
    shutil.rmtree(home / "meter", ignore_errors=True)  # of an earlier start
    (home / "meter").mkdir(mode=0o700)
    log, began_s = home / "server.log", time.perf_counter()
    running = StartedServer(target, home, _spawn(server, memory, given, log))
    try:
        try:
            await running.begin(model, log, began_s)
        except Exception as error:  # it may answer in any way
            said = (
                f"{log.read_text(errors='replace')[-LOG_CHARS:]}\n{type(error).__name__}: {error}"
            )
            raise ServerStartError(without_paths(COLOUR.sub("", said), model, home)) from error
        yield running
    finally:
        await running.stop()


# ---------------------------------------------------------------- the process


def _spawn(
    server: Server, memory: Memory, given: Mapping[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    program = program_of(server)
    if program is None:
        raise ServerStartError(f"{server.name} is not on this machine")
    words = (*server.command[1:], *server.memory_arguments.get(memory, ()))
    log.unlink(missing_ok=True)
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
        return subprocess.Popen(
            [program, *(each.format(**given) for each in words)],
            cwd=given["dir"],
            env=environment_of(server, memory, given, os.environ, env_file()),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C ends the bench, which then ends it
        )


async def _is_healthy(session: aiohttp.ClientSession) -> bool:
    timeout = aiohttp.ClientTimeout(5)
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
        async with session.get("/health", timeout=timeout, allow_redirects=False) as response:
            told = json.loads(await body_of(response))
            return isinstance(told, dict) and str(told.get("status")).lower() in READY
    return False


async def _until(is_so: Callable[[], bool], wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not (found := is_so()) and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
