"""Measures what the proxy itself costs: CPU a streamed chunk and a request, first byte, start.

The real proxy runs before the tests' scripted worker, so no model computes and only the proxy's
process is counted. `--beside DIR` measures another checkout's in turn with ours, each round in the
other order; told are medians, and medians of each round's ratios.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from hearth.shared.paths import PROJECT_DIR
from scripts.faults.own_server import MODEL_ID, OwnServer
from scripts.fixtures.fixture_cache import fixture_dir

OURS: Final = "ours"
BESIDE: Final = "beside"
# How many at once, and the seconds between two tokens of each. What waking a process costs a
# machine is spread over the many.
STREAMS: Final = (32, 0.02)
FAST_STREAMS: Final = (4, 0.005)
STREAM_S: Final = 3.0
REQUESTS: Final = 50
FIRST_BYTES: Final = 20
SETTLE_S: Final = 2.0  # from the worker's welcome until memory is looked at
POLL_S: Final = 0.005
START_S_MAX: Final = 60.0

Figures = dict[str, float]


def run(options: argparse.Namespace) -> dict[str, Any]:
    sides = {OURS: PROJECT_DIR} | ({BESIDE: options.beside.resolve()} if options.beside else {})
    rows = asyncio.run(_measure(sides, options.pairs, options.starts))
    told = {name: _summary(rows, name) for name in rows[0][OURS] | rows[-1][OURS]}
    print(json.dumps(told, indent=1))
    return {"told": told, "rows": rows}


def _summary(rows: list[dict[str, Figures]], name: str) -> Figures:
    """Return each side's median of one figure, and the median of the rounds' ratios."""
    found = [row for row in rows if name in row[OURS]]
    told = {side: statistics.median(row[side][name] for row in found) for side in found[0]}
    if BESIDE in told:
        told["ratio"] = statistics.median(row[OURS][name] / row[BESIDE][name] for row in found)
    return {side: round(value, 4) for side, value in told.items()}


async def _measure(sides: dict[str, Path], pairs: int, starts: int) -> list[dict[str, Figures]]:
    async def started(name: str) -> Figures:
        async with _proxy(sides[name]) as proxy:
            return await proxy.start_figures()

    rows = [await _in_turns(sides, number, started) for number in range(starts)]
    async with contextlib.AsyncExitStack() as stack:
        proxies = {name: await stack.enter_async_context(_proxy(sides[name])) for name in sides}
        for number in range(-1, pairs):
            rows.append(await _in_turns(sides, number, lambda name: proxies[name].figures()))
            print(f"round {number + 1} of {pairs}: {rows[-1]}", file=sys.stderr)
    del rows[starts]  # the first round warms up
    return rows


async def _in_turns(
    sides: dict[str, Path], number: int, measure: Callable[[str], Awaitable[Figures]]
) -> dict[str, Figures]:
    """Measure each side once, in the other order than in the round before."""
    return {name: await measure(name) for name in sorted(sides, reverse=number % 2 > 0)}


@dataclass(frozen=True, slots=True)
class _Proxy:
    """A proxy that answers, before a scripted worker."""

    server: OwnServer
    process: psutil.Process
    health_s: float

    async def start_figures(self) -> Figures:
        await asyncio.sleep(SETTLE_S)
        return {
            "health_s": self.health_s,
            "start_cpu_s": self._cpu_s(),
            "rss_mb": self.process.memory_info().rss / 1e6,
        }

    async def figures(self) -> Figures:
        chunk_ms, _ = await self._streams(*STREAMS)
        fast_chunk_ms, fast_token_ms = await self._streams(*FAST_STREAMS)
        return {
            "chunk_cpu_ms": chunk_ms,
            "fast_chunk_cpu_ms": fast_chunk_ms,
            "fast_token_cpu_ms": fast_token_ms,
            "request_cpu_ms": await self._requests(),
            "first_byte_ms": await self._first_byte(),
        }

    def _cpu_s(self) -> float:
        if sys.platform == "linux":  # its CPU clock counts nanoseconds, cpu_times() 10 ms
            return time.clock_gettime(~self.process.pid << 3 | 2)  # clock_getcpuclockid(3)
        return float(sum(self.process.cpu_times()[:2]))  # user, system

    async def _streams(self, streams: int, token_s: float) -> tuple[float, float]:
        """Return the CPU milliseconds of a chunk, and of a token, over several streams at once."""
        tokens = round(STREAM_S / token_s)
        asked = f"n={tokens} delay={token_s}"
        before_s = self._cpu_s()
        replies = await asyncio.gather(*(self._ask(asked, stream=True) for _ in range(streams)))
        used_ms = (self._cpu_s() - before_s) * 1000
        count = sum(reply.count(b"data: {") for reply, _ in replies)
        return used_ms / count, used_ms / (tokens * streams)

    async def _requests(self) -> float:
        """Return the CPU milliseconds of a request that is answered whole, with one token."""
        before_s = self._cpu_s()
        for _ in range(REQUESTS):
            await self._ask("n=1", stream=False)
        return (self._cpu_s() - before_s) * 1000 / REQUESTS

    async def _first_byte(self) -> float:
        """Return the milliseconds from the worker's receipt of a request to its first event.

        The worker notes the receipt, admits at once, and is the same in both checkouts.
        """
        log, taken_ms = self.server.directory / "worker.log", []
        for _ in range(FIRST_BYTES):
            _, first_at = await self._ask("n=1 delay=0.01", stream=True)
            rows = map(json.loads, reversed(log.read_text().splitlines()))
            received_at = next(row["at"] for row in rows if row["event"] == "Submit")
            taken_ms.append((first_at - received_at) * 1000)
        return statistics.median(taken_ms)

    async def _ask(self, asked: str, *, stream: bool) -> tuple[bytes, float]:
        """Return the reply to one request on a connection of its own, and when its first part came.

        A stream's first part is its first event.
        """
        body = {
            "model": MODEL_ID,
            "messages": [{"role": "user", "content": asked}],
            "stream": stream,
        }
        url = f"{self.server.url}/v1/chat/completions"
        async with aiohttp.request("POST", url, json=body, raise_for_status=True) as reply:
            first = await reply.content.readany()
            first_at = time.time()
            assert b"data: {" in first or not stream, first[:400]
            return first + await reply.read(), first_at


@contextlib.asynccontextmanager
async def _proxy(project: Path) -> AsyncIterator[_Proxy]:
    """Run the proxy of the checkout `project` before a scripted worker."""
    server = OwnServer(
        {
            **{"WORKERS": "1", "MAX_KV_SIZE_GB": "0", "PROXY_API_KEY": ""},
            "MODEL_PATH": str(fixture_dir("qwen3")),  # which the worker does not load
            "PYTHONPATH": f"{project / '.ci' / 'types'}:{project}",
        },
        "tests.helpers.worker_processes.fake_worker",
        project,
    )
    began = time.perf_counter()
    server.start()
    try:
        while not await server.told("/health") and time.perf_counter() < began + START_S_MAX:
            await asyncio.sleep(POLL_S)
        health_s = time.perf_counter() - began
        if not await server.until_ready(START_S_MAX):
            raise SystemExit(f"the proxy does not start:\n{server.log_tail()}")
        yield _Proxy(server, psutil.Process(server.process.pid), health_s)
    finally:
        server.close()
