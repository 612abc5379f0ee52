"""Measures the CPU time that an open dashboard and a metrics scraper add to each token.

The same answers are decoded in pairs, one with nobody looking and one with a dashboard open and
/metrics scraped every 5 s (Prometheus asks every 15), in an order that takes turns. Told is
the CPU per token of proxy and worker together, as the median of the pairs' ratios. What is counted
at a request's end goes on either way: `--beside DIR` decodes the same on the server of another
checkout too, one from before there was anything to look at, say.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from scripts.bench.servers import Http, cpu_s, hearth_side
from scripts.fixtures.fixture_cache import fixture_dir

ABOUT: Final = "CPU per token with a dashboard open and /metrics scraped, against nobody looking"
SCRAPE_EVERY_S: Final = 5.0
SETTLE_S: Final = 1.0  # what a page is told first is told once, not each second
ANSWER_TOKENS_MAX: Final = 1_000
UNWATCHED: Final = "unwatched"
WATCHED: Final = "watched"
BESIDE: Final = "beside"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4_000, help="decoded in each half of a pair")
    parser.add_argument("--model", type=Path, help="a model directory; default the qwen3 fixture")
    parser.add_argument("--beside", type=Path, help="another checkout, as a third side")
    parser.add_argument("--out", type=Path)


def run(options: argparse.Namespace) -> None:
    model = (options.model or fixture_dir("qwen3")).resolve()
    rows = asyncio.run(measure(model, options.pairs, options.tokens, options.beside))
    told: dict[str, Any] = {
        "pairs": options.pairs,
        "tokens": [min(row["tokens"] for row in rows), max(row["tokens"] for row in rows)],
        "ms_per_token": {side: median(rows, side) for side in rows[0]["cpu_ms"]},
    }
    others = [side for side in rows[0]["cpu_ms"] if side != UNWATCHED]
    told["ratio_to_unwatched"] = {
        side: round(
            statistics.median(row["cpu_ms"][side] / row["cpu_ms"][UNWATCHED] for row in rows), 4
        )
        for side in others
    }
    print(json.dumps(told, indent=1))
    if options.out:
        options.out.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n")


def median(rows: list[dict[str, Any]], side: str) -> float:
    return round(statistics.median(float(row["cpu_ms"][side]) for row in rows), 4)


async def measure(
    model: Path, pairs: int, tokens: int, beside: Path | None
) -> list[dict[str, Any]]:
    """Return for each pair the answer's tokens, and each side's CPU milliseconds per token."""
    async with contextlib.AsyncExitStack() as stack:
        log_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-bench-")))
        ours = await stack.enter_async_context(hearth_side(model, log_dir))
        sides = {UNWATCHED: ours, WATCHED: ours}
        if beside is not None:
            (log_dir / BESIDE).mkdir()
            other = hearth_side(model, log_dir / BESIDE, project=beside)
            sides[BESIDE] = await stack.enter_async_context(other)
        rows = []
        for number in range(-1, pairs):  # the first pair warms up
            row = await one_round(sides, number, tokens)
            if number >= 0:
                rows.append(row)
                print(f"round {number + 1} of {pairs}: {row}", file=sys.stderr)
    return rows


async def one_round(sides: dict[str, Http], number: int, tokens: int) -> dict[str, Any]:
    seed = random.randbytes(8).hex()
    turn = number % len(sides)
    cpu_ms, count = {}, 0
    for name in [*sides, *sides][turn : turn + len(sides)]:
        async with looking(sides[name]) if name == WATCHED else contextlib.nullcontext():
            cpu_ms[name], count = await one_half(sides[name], seed, tokens)
    return {"tokens": count, "cpu_ms": dict(sorted(cpu_ms.items()))}


async def one_half(side: Http, seed: str, tokens: int) -> tuple[float, int]:
    """Ask the questions of `seed` until they have brought `tokens` tokens, however long each is."""
    used_s, count = 0.0, 0
    while count < tokens:
        question = [{"role": "user", "content": f"Question {seed} {count}"}]
        await side.ask(question, 1)  # so that reading its prompt is nobody's cost
        before_s = cpu_s(side.processes)
        count += (await side.ask(question, ANSWER_TOKENS_MAX)).completion_tokens
        used_s += cpu_s(side.processes) - before_s
    return used_s * 1000 / count, count


@contextlib.asynccontextmanager
async def looking(side: Http) -> AsyncIterator[None]:
    """Have a dashboard open and /metrics scraped for the length of the block."""
    watchers = [asyncio.create_task(each(side)) for each in (_dashboard, _scraper)]
    await asyncio.sleep(SETTLE_S)
    try:
        yield
    finally:
        for watcher in watchers:
            if watcher.done():
                watcher.result()  # raises what it died of
            watcher.cancel()


async def _dashboard(side: Http) -> None:
    async with side.session.get("/dashboard/events") as response:
        response.raise_for_status()
        async for _ in response.content.iter_any():
            pass


async def _scraper(side: Http) -> None:
    while True:
        async with side.session.get("/metrics") as response:
            response.raise_for_status()
            await response.read()
        await asyncio.sleep(SCRAPE_EVERY_S)
