"""Prints what a server's workers keep, as GET /v1/cache tells it: sums, figures, slots, lines.

    hearth cache --base-url http://127.0.0.1:4000 [--key K] [--lines 20]

Exit status 0: all is within its bounds; 1: a budget is exceeded, a counter that must stay 0 is
not, or a worker cannot tell; 2: the server does not answer.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from hearth.commands.server_client import (
    Row,
    counts_of,
    figure,
    parser_of,
    run,
    server_of,
    table,
    verdict,
)
from hearth.commands.terminal_text import plain

MUST_BE_ZERO: Final = ("exact_key_rejected_by_model_lcp",)
# (what is used, its limit) in a worker's row
LIMITS: Final = (
    *(("bytes", "budget_bytes"), ("buffers", "budget_buffers")),
    *(("pinned_bytes", "pinned_bytes_max"), ("directory_bytes_used", "bytes_max")),
)


def figures_of(told: Row, outer: str = "") -> dict[str, Any]:
    """Return what of `told` is no list, each by its whole name (`disk.counts.reads`)."""
    rows: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, dict):
            rows |= figures_of(value, f"{outer}{name}.")
        elif not isinstance(value, list):
            rows[f"{outer}{name}"] = "-" if value is None else value
    return rows


def show(worker: Row, lines_max: int) -> None:
    """Print what one worker tells: its figures, then each list, `entries` being the lines."""
    print(table(("figure", "value"), list(figures_of(worker).items())))
    for name, value in worker.items():
        if isinstance(value, list) and (rows := value[:lines_max]):
            head = list(rows[0])
            cells = [[row.get(each, "-") for each in head] for row in rows]
            print("", plain(name), table(head, cells), sep="\n")
    print()


def misses_of(worker: Row) -> list[str]:
    """Return what is not within its bounds."""
    name = f"worker {worker.get('worker', '-')}"
    if worker.get("state") == "unloaded":
        return []  # on purpose, and it has nothing in memory
    if "error" in worker:
        return [f"{name} cannot tell: {worker['error']}"]
    counts = counts_of(worker)
    misses = [f"{name}: {each} is {counts[each]}" for each in MUST_BE_ZERO if counts.get(each)]
    figures = (worker.get("disk") or {}) | worker
    for used, limit in LIMITS:
        if figure(figures, used) > figure(figures, limit):
            misses.append(
                f"{name}: {used} are {figure(figures, used):,} of {figure(figures, limit):,}"
            )
    slots = len(worker.get("slots") or ())
    if slots > figure(worker, "slots_max"):
        misses.append(f"{name}: {slots} slots of {figure(worker, 'slots_max')}")
    return misses


async def inspect_cache(options: argparse.Namespace) -> int:
    async with server_of(options) as server:
        told = await server.get("/v1/cache")
    workers = told["workers"]
    sums = figures_of(told.get("totals") or {})
    print(table(("all requests", "value"), list(sums.items())), end="\n\n")
    for worker in workers:
        show(worker, options.lines)
    misses = [miss for worker in workers for miss in misses_of(worker)]
    return verdict(misses, f"{len(workers)} workers within their bounds")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("cache", __doc__)
    parser.add_argument("--lines", type=int, default=20, help="of each list, last used first")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return run(inspect_cache(options_of(arguments)))


if __name__ == "__main__":
    sys.exit(main())
