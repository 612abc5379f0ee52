"""Measures what a chat notes of texts that are embedded beside it: the gaps between its tokens.

One server has a chat model and an embedding model. A chat streams alone, then beside one request of
many texts, in turns; told are both 95th percentiles of the gaps and the medians of their ratios.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

from scripts.bench.servers import Http, SideError, hearth_side
from scripts.fixtures.embedding_checkpoints import embedding_checkpoint

ABOUT: Final = "gaps between a chat's tokens beside one request of many texts, over those alone"
ALONE_S: Final = 6.0
WORDS: Final = ("imports,", "classes", "and", "what", "they", "return", "in", "a", "module")
CHAT: Final = [{"role": "user", "content": "Tell me a long story about a lighthouse."}]

Figures = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="builtin:pocket", help="that chats")
    parser.add_argument("--embedding", help="a directory; default: MiniLM's size, random")
    parser.add_argument("--texts", type=int, default=1_000)
    parser.add_argument("--words", type=int, default=60, help="of the longest text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)


def run(options: argparse.Namespace) -> None:
    os.environ["EMBEDDING_MODEL"] = options.embedding or str(embedding_checkpoint("minilm_sized"))
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as directory:
        rows = asyncio.run(_measure(options, Path(directory)))
    told = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    print(json.dumps({name: round(value, 3) for name, value in told.items()}, indent=1))
    if options.out:
        options.out.write_text(json.dumps({"told": told, "rows": rows}, indent=1) + "\n")


async def _measure(options: argparse.Namespace, directory: Path) -> list[Figures]:
    texts = [_text(number, 1 + number % options.words) for number in range(options.texts)]
    async with hearth_side(Path(options.model), directory) as side:
        await _embed(side, texts[:50])  # the process starts, and what is compiled is compiled
        await _embed(side, texts)
        return [await _round(side, texts) for _ in range(options.rounds)]


def _text(number: int, count: int) -> str:
    return " ".join(WORDS[(number + at) % len(WORDS)] for at in range(count))


async def _round(side: Http, texts: list[str]) -> Figures:
    embed_alone_s = await _embed(side, texts)
    resting = asyncio.create_task(asyncio.sleep(ALONE_S))
    alone = await _gaps_until(side, resting)
    began = time.perf_counter()
    beside = await _gaps_until(side, asyncio.create_task(_embed(side, texts)))
    row = {
        "alone_p95_ms": _p95(alone) * 1e3,
        "beside_p95_ms": _p95(beside) * 1e3,
        "p95_ratio": _p95(beside) / _p95(alone),
        "alone_median_ms": statistics.median(alone) * 1e3,
        "beside_median_ms": statistics.median(beside) * 1e3,
        "beside_longest_ms": max(beside) * 1e3,
        "embed_alone_s": embed_alone_s,
        "embed_beside_s": time.perf_counter() - began,
    }
    print(json.dumps({name: round(value, 3) for name, value in row.items()}), flush=True)
    return row


def _p95(gaps: list[float]) -> float:
    return statistics.quantiles(gaps, n=20)[-1]


async def _embed(side: Http, texts: list[str]) -> float:
    """Have texts embedded in one request; return the seconds that took."""
    began = time.perf_counter()
    body = {"model": "text-embedding-3-small", "input": texts, "encoding_format": "base64"}
    async with side.session.post("/v1/embeddings", json=body) as response:
        told = await response.read()
        if response.status != 200:
            raise SideError(f"status {response.status}: {told[:500].decode()}")
    return time.perf_counter() - began


async def _gaps_until(side: Http, task: "asyncio.Task[Any]") -> list[float]:
    """Return the seconds between two tokens of chats that stream until `task` ends."""
    gaps: list[float] = []
    while not task.done():
        last = 0.0
        async with contextlib.aclosing(_tokens(side)) as tokens:
            async for now in tokens:
                if last:
                    gaps.append(now - last)
                last = now
                if task.done():
                    break
    await task
    return gaps


async def _tokens(side: Http) -> AsyncGenerator[float, None]:
    """Yield when each piece of one chat's answer came."""
    body = {"model": side.model, "messages": CHAT, "max_tokens": 2_000, "stream": True}
    async with side.session.post("/v1/chat/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield time.perf_counter()
