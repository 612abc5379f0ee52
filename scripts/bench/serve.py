"""Measures how fast Hearth answers, beside raw mlx-lm and mlx_lm.server.

All sides answer the same new questions in the same run, one after the other in an order that
rotates, so that whatever else the machine does meets all of them. Reported are medians, and the
medians of each round's ratios to raw. Decode speed is over short questions, from asking to the end
of the answer.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.bench.servers import (
    PROJECT_DIR,
    Messages,
    Raw,
    RawSmallChunks,
    Side,
    SideError,
    cpu_s,
    hearth_side,
    raw_side,
    server_side,
)
from scripts.fixtures.fixture_cache import fixture_dir

ABOUT = "decode speed, time to first token and CPU beside raw mlx-lm and mlx_lm.server"
SIDES = ("raw", "server", "hearth")
DECODE_PROMPT_TOKENS = 64
DECODE_TOKENS = 128
STREAM_COUNT = 4
TTFT_PROMPT_TOKENS = (512, 2048)
TTFT_DECODE_TOKENS = 8  # enough for a first piece of text where a character spans tokens
SMALL_CHUNKS = "raw256"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, default=20, help="rounds, all sides in each")
    parser.add_argument("--model", type=Path, help="a model directory; default the qwen3 fixture")
    parser.add_argument("--sides", default=",".join(SIDES), help="of " + ", ".join(SIDES))
    parser.add_argument("--seed", default="", help="of the questions; default a new one")
    parser.add_argument("--out", type=Path, help="default bench/serve-<host>.json")


def run(options: argparse.Namespace) -> None:
    """Measure, print the table, and write the JSON."""
    sides = ["raw", *(side for side in options.sides.split(",") if side != "raw")]
    if odd := sorted(set(sides) - set(SIDES)):
        raise SystemExit(f"no side {', '.join(odd)}; there are {', '.join(SIDES)}")
    model = options.model or fixture_dir("qwen3")
    seed = options.seed or random.randbytes(8).hex()
    report = {**machine(), "model": str(model), "pairs": options.pairs, "seed": seed}
    try:
        figures = asyncio.run(measure(model.resolve(), sides, options.pairs, seed))
    except SideError as error:
        raise SystemExit(str(error)) from None
    report["load_after"] = os.getloadavg()
    report["notes"] = sorted(figures.notes)
    report["metrics"] = summary(figures)
    out = options.out or PROJECT_DIR / "bench" / f"serve-{platform.node()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report["metrics"]))
    for note in report["notes"]:
        print("note:", note)
    print(f"{options.pairs} rounds, written to {out}")


def machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=PROJECT_DIR, capture_output=True, text=True, check=False
    )
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "load_before": os.getloadavg(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit.stdout.strip(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "litellm")},
        "python": platform.python_version(),
    }


# ---------------------------------------------------------------- measuring


@dataclass
class Figures:
    """metric -> side -> one value a round, and what a reader must know about them."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    notes: set[str] = field(default_factory=set)

    def add(self, metric: str, side: str, value: float) -> None:
        self.values.setdefault(metric, {}).setdefault(side, []).append(value)


async def measure(model: Path, names: list[str], pair_count: int, seed: str) -> Figures:
    starters: dict[str, Any] = {"raw": raw_side, "server": server_side, "hearth": hearth_side}
    figures = Figures()
    async with contextlib.AsyncExitStack() as stack:
        log_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-bench-")))
        sides: dict[str, Side] = {}
        for name in names:
            sides[name] = await stack.enter_async_context(starters[name](model, log_dir))
        raw = sides["raw"]
        assert isinstance(raw, Raw)
        await one_round(sides, raw, f"{seed} warm", 0, Figures())
        for number in range(pair_count):
            print(f"round {number + 1} of {pair_count}", file=sys.stderr)
            await one_round(sides, raw, f"{seed} {number}", number, figures)
        note_environment(sides, figures)
    return figures


async def one_round(
    sides: dict[str, Side], raw: Raw, seed: str, number: int, figures: Figures
) -> None:
    """Put each kind of question to each side."""
    single = await raw.prompt(DECODE_PROMPT_TOKENS, DECODE_TOKENS, f"{seed} single")
    for name, side in rotated(sides, number):
        await measure_decode(name, side, single, figures)
    several = [
        await raw.prompt(DECODE_PROMPT_TOKENS, DECODE_TOKENS, f"{seed} {stream}")
        for stream in range(STREAM_COUNT)
    ]
    for name, side in rotated(sides, number):
        together = await side.together(several, DECODE_TOKENS)
        figures.add("tok_s_4", name, together.tok_s)
    with_small_chunks = sides | {SMALL_CHUNKS: RawSmallChunks.beside(raw)}
    for tokens in TTFT_PROMPT_TOKENS:
        question = await raw.prompt(tokens, TTFT_DECODE_TOKENS, f"{seed} {tokens}")
        for name, side in rotated(with_small_chunks, number):
            answer = await side.ask(question, TTFT_DECODE_TOKENS)
            figures.add(f"ttft_{tokens}_ms", name, answer.ttft_s * 1000)
            if answer.prompt_tokens != tokens:
                figures.notes.add(f"{name} counts {answer.prompt_tokens} for {tokens} tokens")


async def measure_decode(name: str, side: Side, question: Messages, figures: Figures) -> None:
    groups = {"cpu_ms_per_token": [side.process], "cpu_all_ms_per_token": side.processes}
    before = {metric: cpu_s(processes) for metric, processes in groups.items()}
    answer = await side.ask(question, DECODE_TOKENS)
    figures.add(f"ttft_{DECODE_PROMPT_TOKENS}_ms", name, answer.ttft_s * 1000)
    figures.add("tok_s", name, answer.tok_s)
    figures.add("tok_s_after_first", name, answer.tok_s_after_first)
    for metric, processes in groups.items():
        used_s = cpu_s(processes) - before[metric]
        figures.add(metric, name, used_s * 1000 / answer.completion_tokens)
    if answer.completion_tokens != DECODE_TOKENS:
        figures.notes.add(f"{name} decoded {answer.completion_tokens} of {DECODE_TOKENS} tokens")


def rotated(sides: dict[str, Side], number: int) -> list[tuple[str, Side]]:
    rows = list(sides.items())
    turn = number % len(rows)
    return rows[turn:] + rows[:turn]


def note_environment(sides: dict[str, Side], figures: Figures) -> None:
    """Say where a side computes without the BLAS that the others have."""
    preloads = {name: side.process.environ().get("LD_PRELOAD") for name, side in sides.items()}
    if len(set(preloads.values())) > 1:
        figures.notes.add(f"the sides differ in LD_PRELOAD: {preloads}")


# ---------------------------------------------------------------- reporting


def summary(figures: Figures) -> dict[str, dict[str, Any]]:
    """Return each metric's medians, ratios to raw, and values."""
    metrics = {}
    for metric, by_side in figures.values.items():
        row = {
            "median": {side: statistics.median(values) for side, values in by_side.items()},
            "ratio_to_raw": {side: median_ratio(by_side, side) for side in by_side},
            "values": by_side,
        }
        if metric.startswith("ttft"):
            row["added_ms"] = {
                base: {side: median_added(by_side, side, base) for side in by_side}
                for base in ("raw", SMALL_CHUNKS)
                if base in by_side
            }
        metrics[metric] = row
    return metrics


def median_ratio(by_side: dict[str, list[float]], side: str) -> float:
    pairs = zip(by_side[side], by_side["raw"], strict=True)
    return statistics.median(value / raw for value, raw in pairs)


def median_added(by_side: dict[str, list[float]], side: str, base: str) -> float:
    pairs = zip(by_side[side], by_side[base], strict=True)
    return statistics.median(value - of_base for value, of_base in pairs)


LABELS = {
    "tok_s": "tok/s, 1 stream",
    "tok_s_after_first": "  after the first text",
    "tok_s_4": f"tok/s, {STREAM_COUNT} streams",
    "cpu_ms_per_token": "CPU ms/token, worker",
    "cpu_all_ms_per_token": "CPU ms/token, with proxy",
    "ttft_64_ms": "first text ms, 64 tokens",
    "ttft_512_ms": "first text ms, 512",
    "ttft_2048_ms": "first text ms, 2048",
}
HEADERS = {
    "raw": "raw",
    SMALL_CHUNKS: "raw, chunk 256",
    "server": "mlx_lm.server",
    "hearth": "hearth",
}


def table(metrics: dict[str, dict[str, Any]]) -> str:
    """Return the medians with their ratios to raw in brackets, one line a metric."""
    columns = [side for side in HEADERS if any(side in row["median"] for row in metrics.values())]
    lines = [line("", [HEADERS[side] for side in columns])]
    for metric in sorted(metrics, key=list(LABELS).index):
        row = metrics[metric]
        cells = [cell(row["median"], row["ratio_to_raw"], side) for side in columns]
        lines.append(line(LABELS[metric], cells))
        for base, added in row.get("added_ms", {}).items():
            cells = [f"{added[side]:+.1f}" if side in added else "" for side in columns]
            lines.append(line(f"  over {HEADERS[base]}", cells))
    return "\n".join(lines)


def line(label: str, cells: list[str]) -> str:
    return f"{label:26}" + "".join(f"{text:>20}" for text in cells)


def cell(medians: dict[str, float], ratios: dict[str, float], side: str) -> str:
    if side not in medians:
        return "n/a"
    return f"{medians[side]:.4g} ({ratios[side]:.2f}x)"
