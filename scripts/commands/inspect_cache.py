"""Shows what a server's workers keep: budget, disk, live slots, lines, pins, counters.

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

MUST_BE_ZERO: Final = ("exact_key_rejected_by_model_lcp",)
# (what is used, its limit) in a worker's row
LIMITS: Final = (
    *(("bytes", "budget_bytes"), ("buffers", "budget_buffers")),
    *(("pinned_bytes", "pinned_bytes_max"), ("directory_bytes_used", "bytes_max")),
)
HEAD: Final = (
    *("worker", "MB", "of MB", "buffers", "of buffers", "slots", "slots MB", "extents"),
    *("snapshots", "evictions", "mode"),
)
DISK_HEAD: Final = (
    *("disk: files", "MB", "MB of all", "of MB", "MB written today", "of MB a day", "MB to write"),
)
DISK_FIGURES: Final = (
    *("bytes_used", "directory_bytes_used", "bytes_max"),
    *("bytes_written_today", "write_bytes_per_day", "queue_bytes"),
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


def counter_rows(worker: Row) -> list[tuple[Any, ...]]:
    """Return the counters of the cache, the sessions and the disk, a nested one by both names."""
    counts = counts_of(worker) | {"disk": (worker.get("disk") or {}).get("counts") or {}}
    rows: dict[str, Any] = {}
    for name, count in counts.items():
        nested = count if isinstance(count, dict) else {"": count}
        rows |= {f"{name}_{each}".rstrip("_"): value for each, value in nested.items()}
    return sorted(rows.items())


def show(worker: Row, lines_max: int) -> None:
    """Print one worker's disk, slots, lines, pins and counters, or why it tells none."""
    print(f"\nworker {worker.get('worker', '-')}")
    if "error" in worker:
        print(worker["error"])
    if disk := worker.get("disk"):
        figures = (megabytes(disk, name) for name in DISK_FIGURES)
        print(table(DISK_HEAD, [(disk.get("files", "-"), *figures)]))
    if slots := slot_rows(worker):
        print(table(("slot", "tokens", "MB", "state", "line"), slots))
    if lines := line_rows(worker, lines_max):
        head = ("line", "tokens", "own tokens", "hits", "turns", "age s", "idle s", "MB")
        print(table(head, lines))
    if pins := worker.get("pins"):
        rows = [(pin["id"], figure(pin, "tokens"), megabytes(pin, "bytes")) for pin in pins]
        print(table(("pin", "tokens", "MB"), rows))
    if counts := counter_rows(worker):
        print(table(("counter", "count"), counts))


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
        workers = (await server.get("/v1/cache"))["workers"]
    print(table(HEAD, [summary_row(worker) for worker in workers]))
    for worker in workers:
        show(worker, options.lines)
    print()
    misses = [miss for worker in workers for miss in misses_of(worker)]
    return verdict(misses, f"{len(workers)} workers within their bounds")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of("cache", __doc__)
    parser.add_argument("--lines", type=int, default=20, help="of each worker, last used first")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return run(inspect_cache(options_of(arguments)))


if __name__ == "__main__":
    sys.exit(main())
