"""Starts what the benchmarks measure: raw mlx-lm, mlx_lm.server and Hearth, as own processes.

A side answers `ask` (one conversation) and `together` (several at once), both greedily. Servers
run with their user's own settings and without a meter, Hearth's of any checkout: what `hearth
bench` measures in an empty home, `scripts/commands/bench/servers/` starts.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import psutil

from hearth.shared.openblas_preload import openblas_environment

PROJECT_DIR = Path(__file__).resolve().parents[2]
START_WAIT_S_MAX = 180.0
STOP_WAIT_S_MAX = 30.0  # a worker on a GPU ends its chunk first
ANSWER_WAIT_S_MAX = 300.0
LINE_BYTES_MAX = 16 * 1024 * 1024
READY = frozenset(("ok", "healthy"))  # as the servers' /health words it

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Answer:
    """How one generation went, seen from the asker."""

    prompt_tokens: int
    completion_tokens: int
    ttft_s: float  # from the question to the first text
    decode_s: float  # from the first text to the end

    @property
    def tok_s(self) -> float:
        """Tokens a second from the question on: a side that sends late gains nothing."""
        return self.completion_tokens / (self.ttft_s + self.decode_s)

    @property
    def tok_s_after_first(self) -> float:
        """Tokens a second after the first text; too high where that brought several tokens."""
        return (self.completion_tokens - 1) / self.decode_s


@dataclass(frozen=True, slots=True)
class Together:
    """How several generations at once went, as a whole."""

    completion_tokens: int
    wall_s: float  # from the questions to the end of all

    @property
    def tok_s(self) -> float:
        return self.completion_tokens / self.wall_s


class Side(Protocol):
    """One thing that is measured. `process` is the one of `processes` that computes."""

    process: psutil.Process
    processes: list[psutil.Process]

    async def ask(self, messages: Messages, max_tokens: int) -> Answer: ...

    async def together(self, conversations: list[Messages], max_tokens: int) -> Together: ...


class SideError(Exception):
    """A side did not start, or did not answer; the text says which and what it said."""


def cpu_s(processes: list[psutil.Process]) -> float:
    """Return the CPU-seconds that `processes` have used."""
    return sum(_process_cpu_s(process) for process in processes)


def _process_cpu_s(process: psutil.Process) -> float:
    if sys.platform == "linux":  # its CPU clock counts nanoseconds, cpu_times() 10 ms
        return time.clock_gettime(~process.pid << 3 | 2)  # clock_getcpuclockid(3)
    times = process.cpu_times()
    return float(times.user + times.system)


# ---------------------------------------------------------------- raw mlx-lm


class Raw:
    """mlx-lm without any server, behind the pipe of raw_mlx_lm.py."""

    def __init__(self, child: asyncio.subprocess.Process, log: Path) -> None:
        self._child = child
        self._log = log
        self.process = psutil.Process(child.pid)
        self.processes = [self.process]

    async def ask(self, messages: Messages, max_tokens: int, prefill_step: int = 2048) -> Answer:
        row = await self._do(
            "stream", messages=messages, max_tokens=max_tokens, prefill_step=prefill_step
        )
        return Answer(**row)

    async def together(self, conversations: list[Messages], max_tokens: int) -> Together:
        row = await self._do("together", conversations=conversations, max_tokens=max_tokens)
        return Together(**row)

    async def hello(self) -> None:
        """Wait until the model is loaded."""
        await self._do("hello")

    async def prompt(self, tokens: int, decode_tokens: int, seed: str) -> Messages:
        """Return a new question of `tokens` tokens that raw mlx-lm answers at full length."""
        row = await self._do("prompt", tokens=tokens, decode_tokens=decode_tokens, seed=seed)
        messages: Messages = row["messages"]
        return messages

    async def _do(self, op: str, **arguments: Any) -> dict[str, Any]:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        line = await asyncio.wait_for(stdout.readline(), ANSWER_WAIT_S_MAX)
        if not line:
            raise SideError(f"raw_mlx_lm.py ended during {op}:\n{_tail(self._log)}")
        row: dict[str, Any] = json.loads(line)
        return row


@contextlib.asynccontextmanager
async def raw_side(model: Path, log_dir: Path) -> AsyncIterator[Raw]:
    script = str(PROJECT_DIR / "scripts" / "bench" / "raw_mlx_lm.py")
    log = log_dir / "raw.log"
    async with running([script, str(model)], mlx_environment(), log) as child:
        raw = Raw(child, log)
        await raw.hello()
        yield raw


class RawSmallChunks(Raw):
    """Raw mlx-lm that prefills 256 tokens at a time, as Hearth does on a CPU."""

    @classmethod
    def beside(cls, raw: Raw) -> "RawSmallChunks":
        """Return one that shares the process of `raw`."""
        return cls(raw._child, raw._log)

    async def ask(self, messages: Messages, max_tokens: int, prefill_step: int = 256) -> Answer:
        return await super().ask(messages, max_tokens, prefill_step)


# ---------------------------------------------------------------- over HTTP


class Http:
    """A server that speaks OpenAI chat completions; the session keeps its connections open.

    `processes` names first the one that computes. `extra` goes into each request.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        processes: list[psutil.Process],
        extra: Mapping[str, Any],
    ) -> None:
        self.session = session
        self._extra = dict(extra)
        self.model = str(extra["model"])
        self.process = processes[0]
        self.processes = processes

    async def ask(self, messages: Messages, max_tokens: int) -> Answer:
        start, first, end, usage = await self._stream(messages, max_tokens)
        return Answer(
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            ttft_s=first - start,
            decode_s=end - first,
        )

    async def together(self, conversations: list[Messages], max_tokens: int) -> Together:
        rows = await asyncio.gather(*(self._stream(each, max_tokens) for each in conversations))
        count = sum(usage["completion_tokens"] for *_, usage in rows)
        start, end = min(row[0] for row in rows), max(row[2] for row in rows)
        return Together(count, end - start)

    async def _stream(
        self, messages: Messages, max_tokens: int
    ) -> tuple[float, float, float, dict[str, int]]:
        """Ask once; returns when it was asked, when the first and the last text came, and usage."""
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        start, first, end, usage = time.perf_counter(), None, None, None
        async with self.session.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise SideError(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                if _has_text(chunk):
                    end = time.perf_counter()
                    first = first or end
        if first is None or end is None or usage is None:
            raise SideError("the stream ended without text or usage")
        return start, first, end, usage


def _has_text(chunk: dict[str, Any]) -> bool:
    """Say whether `chunk` brings text of any kind, or the end of it."""
    kinds = ("content", "reasoning", "reasoning_content", "tool_calls")
    return any(
        choice.get("finish_reason") or any((choice.get("delta") or {}).get(kind) for kind in kinds)
        for choice in chunk.get("choices") or ()
    )


@contextlib.asynccontextmanager
async def server_side(model: Path, log_dir: Path) -> AsyncIterator[Http]:
    """Run mlx_lm.server with its own defaults."""
    port = free_port()
    command = ["-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    async with (
        running(command, mlx_environment(), log_dir / "server.log") as child,
        _session(port) as session,
    ):
        await ready(session, child, log_dir / "server.log")
        yield Http(session, [psutil.Process(child.pid)], {"model": "default_model"})


@contextlib.asynccontextmanager
async def hearth_side(
    model: Path, log_dir: Path, project: Path = PROJECT_DIR
) -> AsyncIterator[Http]:
    """Run the Hearth of the checkout `project` as its user would, with one worker."""
    port = free_port()
    environment = {
        **os.environ,
        "MODEL_PATH": str(model),
        "PROXY_PORT": str(port),
        "PROXY_HOST": "127.0.0.1",
        "PROXY_API_KEY": "",
        "WORKERS": "1",
        "RUN_DIR": str(log_dir / "run"),
        "LOG_ROOT": str(log_dir / "logs"),
        "KV_CACHE_DIR": str(log_dir / "kv"),
    }
    async with (
        running(["-m", "hearth.proxy.main"], environment, log_dir / "hearth.log", project) as child,
        _session(port) as session,
    ):
        health = await ready(session, child, log_dir / "hearth.log")
        async with session.get("/v1/models") as response:
            name = (await response.json())["data"][0]["id"]
        pids = health["workers"][0]["pid"], child.pid
        processes = [psutil.Process(pid) for pid in pids]
        yield Http(session, processes, {"model": name, "repetition_penalty": 1.0})


async def ready(
    session: aiohttp.ClientSession, child: asyncio.subprocess.Process, log: Path
) -> dict[str, Any]:
    """Wait until /health says READY; returns what it says."""
    deadline = time.monotonic() + START_WAIT_S_MAX
    while time.monotonic() < deadline and child.returncode is None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.get("/health", timeout=aiohttp.ClientTimeout(5)) as response:
                health: dict[str, Any] = await response.json()
                if health.get("status") in READY:
                    return health
        await asyncio.sleep(0.1)
    raise SideError(f"{log.stem} is not ready (exit status {child.returncode}):\n{_tail(log)}")


@contextlib.asynccontextmanager
async def _session(port: int) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}",
        timeout=aiohttp.ClientTimeout(ANSWER_WAIT_S_MAX),
        read_bufsize=LINE_BYTES_MAX,
    ) as session:
        yield session


# ---------------------------------------------------------------- processes


@contextlib.asynccontextmanager
async def running(
    arguments: list[str],
    environment: Mapping[str, str],
    log: Path,
    project: Path = PROJECT_DIR,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run Python with `arguments` for the length of the block; nothing of it outlives that."""
    with open(log, "wb") as stderr:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            cwd=project,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if arguments[0] != "-m" else stderr,
            stderr=stderr,
            limit=LINE_BYTES_MAX,
        )
        try:
            yield child
        finally:
            await _stop(child)


async def _stop(child: asyncio.subprocess.Process) -> None:
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        family = psutil.Process(child.pid).children(recursive=True)
        child.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(child.wait(), STOP_WAIT_S_MAX)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if child.returncode is None:
        child.kill()
        await child.wait()


def mlx_environment() -> dict[str, str]:
    return {**os.environ, **openblas_environment(os.environ)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
