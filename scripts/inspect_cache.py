#!/usr/bin/env python
"""Shows what a server's workers keep: budget, live slots, lines, counters.

    scripts/inspect_cache.py --base-url http://127.0.0.1:4000 [--key K] [--lines 20]

Exit status 0: all is within its bounds; 1: a budget is exceeded, a counter that must stay 0 is
not, or a worker cannot tell; 2: the server does not answer.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.probing import (
    Row,
    counts_of,
    figure,
    parser_of,
    run,
    server_of,
    table,
    verdict,
)

MUST_BE_ZERO: Final = ("exact_key_rejected_by_model_lcp",)
# (what is used, its limit) in a worker's row
LIMITS: Final = (("bytes", "budget_bytes"), ("buffers", "budget_buffers"))
HEAD: Final = (
    *("worker", "MB", "of MB", "buffers", "of buffers", "slots", "slots MB", "extents"),
    *("snapshots", "evictions", "mode"),
)


def summary_row(worker: Row) -> tuple[Any, ...]:
    slots, slots_max = worker.get("slots") or [], worker.get("slots_max", "-")
    return (
        worker.get("worker", "-"),
        *(megabytes(worker, name) for name in ("bytes", "budget_bytes")),
        *(worker.get(name, "-") for name in ("buffers", "budget_buffers")),
        f"{len(slots)}/{slots_max}",
        megabytes(worker, "slots_bytes"),
        *(worker.get(name, "-") for name in ("extents", "snapshots", "evictions")),
        {True: "exact", False: "fast"}.get(worker.get("exact", ""), "none"),
    )


def megabytes(row: Row, name: str) -> str:
    return f"{row[name] / 1024 / 1024:,.1f}" if name in row else "-"


def slot_rows(worker: Row) -> list[tuple[Any, ...]]:
    return [
        (
            slot.get("slot", "-"),
            figure(slot, "tokens"),
            megabytes(slot, "bytes"),
            "busy" if slot.get("busy") else "idle",
            "-" if slot.get("line") is None else slot["line"],
        )
        for slot in worker.get("slots") or ()
    ]


def line_rows(worker: Row, lines_max: int) -> list[tuple[Any, ...]]:
    names = ("line", "tokens", "own_tokens", "hits", "turns", "age_s", "idle_s")
    return [
        (*(entry.get(name, "-") for name in names), megabytes(entry, "bytes"))
        for entry in (worker.get("entries") or [])[:lines_max]
    ]


def show(worker: Row, lines_max: int) -> None:
    """Print one worker's slots, lines and counters."""
    print(f"\nworker {worker.get('worker', '-')}")
    if slots := slot_rows(worker):
        print(table(("slot", "tokens", "MB", "state", "line"), slots))
    if lines := line_rows(worker, lines_max):
        head = ("line", "tokens", "own tokens", "hits", "turns", "age s", "idle s", "MB")
        print(table(head, lines))
    if counts := counts_of(worker):
        print(table(("counter", "count"), sorted(counts.items())))


def misses_of(worker: Row) -> list[str]:
    """Return what is not within its bounds."""
    name = f"worker {worker.get('worker', '-')}"
    if "error" in worker:
        return [f"{name} cannot tell: {worker['error']}"]
    counts = counts_of(worker)
    misses = [f"{name}: {each} is {counts[each]}" for each in MUST_BE_ZERO if counts.get(each)]
    for used, limit in LIMITS:
        if figure(worker, used) > figure(worker, limit):
            misses.append(
                f"{name}: {used} are {figure(worker, used):,} of {figure(worker, limit):,}"
            )
    slots = len(worker.get("slots") or ())
    if slots > figure(worker, "slots_max"):
        misses.append(f"{name}: {slots} slots of {figure(worker, 'slots_max')}")
    return misses


async def inspect_cache(options: argparse.Namespace) -> int:
    async with server_of(options) as server:
        workers = (await server.get("/v1/cache"))["workers"]
    print(table(HEAD, [summary_row(worker) for worker in workers]))
    for worker in workers:
        show(worker, options.lines)
    print()
    misses = [miss for worker in workers for miss in misses_of(worker)]
    return verdict(misses, f"{len(workers)} workers within their bounds")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--lines", type=int, default=20, help="of each worker, last used first")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(inspect_cache(options_of())))
