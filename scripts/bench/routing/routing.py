"""Measures what each rule of choosing a worker costs, on captured sessions that run at once.

A real server with real workers and a model that computes next to nothing answers all sessions of a
run together. Each request is held to what any session of the run had sent before it, in the ids
that the worker built (the billing header and other volatile fields are not in them). Where more
sessions run than were captured, further users have them, who share an agent's system and tools.

Tokens and the balance of workers are figures at any count of workers. Times are told up to two:
more workers than cores measure contention.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hearth.commands.replay.player import Row, replay_together
from hearth.commands.replay.traces import TRACES_DIR, Captured, load_trace
from scripts.bench.routing.killed_worker import killed_lines, killed_table
from scripts.bench.routing.rules import RULES, TODAY
from scripts.bench.routing.served import QUICK_DISK, SMALL, model_dir, served
from scripts.bench.serve import machine
from scripts.bench.servers import PROJECT_DIR
from scripts.replay.__main__ import summary
from scripts.replay.user_copies import as_user

ABOUT = "what rules of choosing a worker read beside the merged ideal; a worker killed"
TIMED_WORKERS_MAX: Final = 2
DENSE: Final = "qwen3"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", default="1,2,4,8", help="counts, comma-separated")
    parser.add_argument("--rules", default="today,round_robin,least_busy", help=f"of {[*RULES]}")
    parser.add_argument("--sessions", default="10", help="that run at once; 2x = 2 a worker")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--traces", default="", help="names, comma-separated; default all")
    parser.add_argument("--traces-dir", type=Path, default=TRACES_DIR)
    parser.add_argument("--limit", type=int, default=0, help="requests of each trace; 0 = all")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--model", default=DENSE, choices=SMALL, help="what kind of model")
    parser.add_argument("--no-disk", action="store_true", help="workers share no files")
    parser.add_argument("--only", choices=("rules", "killed"), help="one part of it")
    parser.add_argument("--out", type=Path, help="default bench/routing-<host>.json")


def run(options: argparse.Namespace) -> None:
    """Measure, print the tables, and write the JSON after each line of them."""
    out = options.out or PROJECT_DIR / "bench" / f"routing-{platform.node()}.json"
    told: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    told |= machine()
    asyncio.run(_measure(options, told, out))
    told["load_after"] = os.getloadavg()
    _save(out, told)
    print(f"written to {out}")


def _save(out: Path, told: dict[str, Any]) -> None:
    out.write_text(json.dumps(told, indent=1) + "\n")


def chosen_traces(options: argparse.Namespace) -> list[list[Captured]]:
    """Return the sessions that are played: those that are named, or all of the directory."""
    directory: Path = options.traces_dir
    names = [name for name in options.traces.split(",") if name]
    paths = [directory / f"{name}.jsonl.xz" for name in names]
    paths = paths or sorted(directory.glob("*.jsonl.xz"))
    if missing := [str(path) for path in paths if not path.exists()]:
        raise SystemExit(f"there is no {', '.join(missing)}")
    if not paths:
        raise SystemExit(f"there are no traces in {directory}; say where with --traces-dir")
    return [load_trace(path, options.limit) for path in paths]


async def _measure(options: argparse.Namespace, told: dict[str, Any], out: Path) -> None:
    captured = chosen_traces(options)
    if options.only != "killed":
        lines = told.setdefault("rules", [])
        for workers in [int(count) for count in options.workers.split(",")]:
            for rule in options.rules.split(","):
                if workers == 1 and rule != TODAY:
                    continue  # there is no choice
                lines.append(await _line(options, captured, workers, rule))
                print(line_text(lines[-1]), flush=True)
                _save(out, told)
        print(table(lines))
    if options.only != "rules":
        told["killed"] = await killed_lines(captured, options.max_tokens)
        print(killed_table(told["killed"]))


# ---------------------------------------------------------------- one line


@dataclass(frozen=True, slots=True)
class Spread:
    """How a run's requests fell on the workers."""

    requests_by_worker: dict[int, int]
    prefilled_by_worker: dict[int, int]
    workers_a_session: float  # that had some of its requests, in the mean

    @property
    def balance(self) -> float:
        """Return what the worker that read most has read over what each has read in the mean."""
        read = self.prefilled_by_worker.values()
        return max(read) * len(read) / sum(read)


def spread(rows: Sequence[Row], workers: dict[str, int], count: int) -> Spread:
    """Return how `rows` fell on `count` workers; `workers` are by request id."""
    requests, prefilled = Counter[int](), Counter[int]()
    visited: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        if row.tokens is None:
            continue
        worker = workers[row.outcome.request_id]
        requests[worker] += 1
        prefilled[worker] += row.tokens.prefilled
        visited[row.trace].add(worker)
    return Spread(
        {worker: requests[worker] for worker in range(count)},
        {worker: prefilled[worker] for worker in range(count)},
        statistics.mean(map(len, visited.values())),
    )


def at_once(captured: Sequence[Sequence[Captured]], count: int) -> list[list[Captured]]:
    """Return `count` sessions: the captured ones, then those of further users of them."""
    return [
        as_user(captured[number % len(captured)], number // len(captured))
        for number in range(count)
    ]


def session_count(text: str, workers: int) -> int:
    """Return how many sessions run at once; "2x" is two a worker."""
    return int(text.removesuffix("x")) * (workers if text.endswith("x") else 1)


async def _line(
    options: argparse.Namespace, captured: Sequence[Sequence[Captured]], workers: int, rule: str
) -> dict[str, Any]:
    """Return the medians over the rounds of one rule at one count of workers."""
    sessions = at_once(captured, session_count(options.sessions, workers))
    rounds = [await _round(options, sessions, workers, rule) for _ in range(options.rounds)]
    line: dict[str, Any] = {
        "workers": workers,
        "rule": rule,
        "sessions": len(sessions),
        "model": options.model,
        "has_disk": not options.no_disk,
        "limit": options.limit,
    }
    for name in ("ratio", "balance", "workers_a_session"):
        line[name] = statistics.median(each[name] for each in rounds)
    return line | {"rounds": rounds}


async def _round(
    options: argparse.Namespace,
    sessions: Sequence[Sequence[Captured]],
    workers: int,
    rule: str,
) -> dict[str, Any]:
    settings = {"MAX_KV_SIZE_GB": "0"} if options.no_disk else {}
    model = model_dir(options.model)
    async with served(model, workers, settings, rule, options.max_tokens, QUICK_DISK) as server:
        rows, wall_s = await replay_together(sessions, server.target)
        ids = {row.outcome.request_id for row in rows if row.tokens is not None}
        fell = spread(rows, await server.all_finished(ids), workers)
    told = summary(rows, wall_s)
    figures = ("requests", "refused", "failed", "prompt", "prefilled", "ideal")
    line: dict[str, Any] = {name: getattr(told, name) for name in figures}
    line |= {"ratio": told.ratio, "balance": fell.balance, **asdict(fell)}
    line |= {"by_source": by_source(rows)}
    if workers <= TIMED_WORKERS_MAX:
        line |= {name: getattr(told, name) for name in ("ttft_p50_s", "ttft_p95_s", "wall_s")}
    return line


def by_source(rows: Sequence[Row]) -> dict[str, int]:
    """Return how many tokens came from each place that a worker keeps them in."""
    sums = Counter[str]()
    for row in rows:
        if row.tokens is not None and row.tokens.cached:
            sums[row.tokens.source or "not told"] += row.tokens.cached
    return dict(sums)


# ---------------------------------------------------------------- reporting


def line_text(line: dict[str, Any]) -> str:
    ratios = ", ".join(f"{each['ratio']:.3f}" for each in line["rounds"])
    return f"{line['workers']} workers, {line['rule']}: prefilled / ideal {ratios}"


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the lines as a Markdown table."""
    head: tuple[str, ...] = ("workers", "sessions", "files", "rule", "prefilled / ideal", "from to")
    head += ("from SSD", "busiest / mean", "workers a session", "first token p50, p95 s", "wall s")
    rows = [head, tuple("---" for _ in head), *(_cells(line) for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cells(line: dict[str, Any]) -> tuple[str, ...]:
    rounds = line["rounds"]
    ratios = [each["ratio"] for each in rounds]
    times = ["-", "-"]
    if "wall_s" in rounds[0]:
        p50, p95, wall = (
            statistics.median(each[name] for each in rounds)
            for name in ("ttft_p50_s", "ttft_p95_s", "wall_s")
        )
        times = [f"{p50:.2f}, {p95:.2f}", f"{wall:.1f}"]
    return (
        str(line["workers"]),
        str(line["sessions"]),
        "shared" if line["has_disk"] else "none",
        line["rule"],
        f"{line['ratio']:.3f}",
        f"{min(ratios):.3f} {max(ratios):.3f}",
        f"{statistics.median(map(_ssd_share, rounds)):.0%}",
        f"{line['balance']:.2f}",
        f"{line['workers_a_session']:.1f}",
        *times,
    )


def _ssd_share(told: dict[str, Any]) -> float:
    """Return which part of the prompts' tokens a worker had to have from files."""
    return float(told["by_source"].get("ssd", 0) / told["prompt"])
