"""Prints what agents' sessions would cost on models and Macs of real size, in bytes and tokens.

The worker's own scheduler, KV manager, evictor, disk tier and ledger run; their arrays, files and
clocks are only counted (scripts/harness/layouts), so that a pair takes seconds.
"""

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final

from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
from scripts.harness.layouts.counted_engine import MACS
from scripts.harness.layouts.model_layouts import LAYOUTS
from scripts.harness.layouts.pair_replay import Figures, replay_pair
from scripts.harness.layouts.session_scripts import SessionScript, render

GB: Final = 1e9
UNLIMITED: Final = {"KV_DISK_WRITE_GB_PER_DAY": "0"}  # else it hides what would be written
HEAD: Final = (
    *("model", "Mac", "budget GB", "chunk", "rows GB", "least GB"),
    *("written: rows", "window", "state", "all / rows"),
    *("kept GB", "slots GB", "read back GB", "read / ideal", "idle / new"),
    *("forwards", "mean", "median", "< 64", "< 256", "refused"),
)
READ_RATIO_MAX: Final = 1.03  # of tokens read over the ideal, where all fits


def run(options: argparse.Namespace) -> None:
    """Print what all sessions cost on each model and Mac."""
    logging.getLogger("hearth").setLevel(logging.ERROR)
    began = time.perf_counter()
    sessions = rendered(options.traces_dir, options.sessions, options.limit)
    names = ", ".join(session.name for session in sessions)
    print(
        f"\n{names}: each on its own server. GB are 10^9 bytes; least: rows, and a state and a\n"
        "window for each conversation. What exact mode has to read again of answers is in the\n"
        "ideal:\n"
    )
    _print_row(HEAD)
    _print_row(["---"] * len(HEAD))
    settings = UNLIMITED | dict(each.split("=", 1) for each in options.set)
    layouts = [each for each in LAYOUTS if _is_named(each.name, options.models)]
    sizes = [size for size in MACS if _is_named(str(size), options.macs)]
    read_ratios: dict[str, float] = {}  # of sessions all of which RAM holds beside live caches
    for layout, size in itertools.product(layouts, sizes):
        why_not = "does not fit"
        try:
            pair = replay_pair(layout, size, sessions, settings, options.pause)
        except UnknownCache as error:
            pair, why_not = None, f"keeps {error}"
        if pair is None:
            _print_row([layout.name, f"{size} GB", why_not, *([""] * (len(HEAD) - 3))])
            continue
        start = [f"{size} GB", f"{pair.budget_bytes / GB:.2f}", str(pair.chunk)]
        for name, figures in pair.sessions.items():
            if options.each:
                _print_row([name, *start, *_cells(figures)])
            if figures.least_bytes <= pair.budget_bytes:
                read_ratios[f"{layout.name} on {size} GB, {name}"] = figures.read_ratio
        _print_row([layout.name, *start, *_cells(pair.total)])
    over = [f"- {at} {ratio:.3f}" for at, ratio in read_ratios.items() if ratio > READ_RATIO_MAX]
    print(
        f"\n{len(read_ratios)} sessions fit; above {READ_RATIO_MAX}: {len(over)}", *over, sep="\n"
    )
    print(f"\n{time.perf_counter() - began:.0f} s", file=sys.stderr)


def _is_named(name: str, names: str) -> bool:
    return not names or name in names.split(",")


def rendered(directory: Path, names: str, limit: int) -> list[SessionScript]:
    """Return the sessions of a directory, or those of these names."""
    wanted = [
        path
        for path in sorted(directory.glob("*.jsonl*"))
        if _is_named(path.name.partition(".")[0], names)
    ]
    if not wanted:
        raise SystemExit(f"there are no such traces in {directory}; say where with --traces-dir")
    return [render(path, limit) for path in wanted]


def _print_row(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def _cells(figures: Figures) -> list[str]:
    written, rows_bytes, forwards = figures.written, figures.rows_bytes, figures.forwards
    return [
        f"{rows_bytes / GB:.2f}",
        f"{figures.least_bytes / GB:.2f}",
        *(f"{written[kind] / GB:.2f}" for kind in ("rows", "window", "state")),
        f"{written.total() / rows_bytes if rows_bytes else 0.0:.2f}",
        f"{figures.kept_bytes_max / GB:.2f}",
        f"{figures.slot_bytes_max / GB:.2f}",
        f"{figures.read.total() / GB:.2f}",
        f"{figures.read_ratio:.3f}",
        f"{figures.idle / figures.new:.3f}" if figures.new else "",
        str(len(forwards)),
        *(f"{mean(forwards or [0]):.0f}" for mean in (fmean, median)),
        *(f"{fmean([each < tokens for each in forwards] or [0]):.0%}" for tokens in (64, 256)),
        ", ".join(f"{name} {count}" for name, count in figures.refused.items()),
    ]
