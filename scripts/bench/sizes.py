"""Prints what agents' sessions would cost on models and Macs of real size, in bytes and tokens.

The worker's own scheduler, KV manager, evictor, disk tier and ledger run; their arrays, files and
clocks are only counted (scripts/harness/layouts), so that 60 pairs take minutes.
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

from hearth.commands.replay.traces import TRACES_DIR
from scripts.harness.layouts.counted_engine import MACS
from scripts.harness.layouts.model_layouts import LAYOUTS, ModelLayout
from scripts.harness.layouts.pair_replay import (
    SHORT_TOKENS,
    Figures,
    PairFigures,
    replay_pair,
)
from scripts.harness.layouts.session_scripts import SessionScript, render

ABOUT: Final = "what sessions cost on models and Macs of real size: SSD, RAM, tokens read again"
GB: Final = 1e9
UNLIMITED: Final = {"KV_DISK_WRITE_GB_PER_DAY": "0"}  # else it hides what would be written
HEAD: Final = (
    *("model", "Mac", "budget GB", "chunk", "rows GB", "least GB"),
    *("written: rows", "window", "state", "all / rows"),
    *("kept GB", "slots GB", "read back GB", "read / ideal", "idle / new"),
    *("forwards", "mean", "median", "< 64", "< 256", "refused"),
)
READ_RATIO_MAX: Final = 1.03  # of tokens read over the ideal, where all fits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="", help="names, comma-separated; default all")
    parser.add_argument("--macs", default="", help="GB of memory, comma-separated; default all")
    parser.add_argument("--sessions", default="", help="names of traces; default all")
    parser.add_argument("--traces-dir", type=Path, default=TRACES_DIR)
    parser.add_argument("--limit", type=int, default=0, help="requests of each trace; 0 = all")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two turns")
    parser.add_argument("--each", action="store_true", help="a row for each session too")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting"
    )


def run(options: argparse.Namespace) -> None:
    logging.getLogger("hearth").setLevel(logging.ERROR)
    began = time.perf_counter()
    layouts = [each for each in LAYOUTS if _is_named(each.name, options.models)]
    sessions = rendered(options.traces_dir, options.sessions, options.limit)
    _print_pairs(layouts, sessions, options)
    print(f"\n{time.perf_counter() - began:.0f} s", file=sys.stderr)


def _print_pairs(
    layouts: Sequence[ModelLayout], sessions: Sequence[SessionScript], options: argparse.Namespace
) -> None:
    """Print what all sessions cost on each model and Mac."""
    names = ", ".join(session.name for session in sessions)
    print(f"\n{names}: each on its own server. GB are 10^9 bytes; least: rows, and a state and a")
    print("window for each conversation. What exact mode has to read again of answers is in the")
    print("ideal:\n")
    settings = UNLIMITED | dict(each.split("=", 1) for each in options.set)
    sizes = [size for size in MACS if _is_named(str(size), options.macs)]
    pairs: list[PairFigures] = []
    print_row(HEAD)
    print_row(["---"] * len(HEAD))
    for layout, size in itertools.product(layouts, sizes):
        pair = replay_pair(layout, size, sessions, settings, options.pause)
        if pair is None:
            print_row([layout.name, f"{size} GB", "does not fit", *([""] * (len(HEAD) - 3))])
        else:
            _print_pair(pair, options.each)
            pairs.append(pair)
    _print_over(pairs)


def _is_named(name: str, names: str) -> bool:
    return not names or name in names.split(",")


def rendered(directory: Path, names: str, limit: int) -> list[SessionScript]:
    """Return the sessions of a directory, or those of these names."""
    paths = sorted(directory.glob("*.jsonl*"))
    wanted = [path for path in paths if _is_named(path.name.partition(".")[0], names)]
    if not wanted:
        raise SystemExit(f"there are no such traces in {directory}; say where with --traces-dir")
    return [render(path, limit) for path in wanted]


def print_row(cells: Sequence[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def _print_pair(pair: PairFigures, prints_each: bool) -> None:
    start = [f"{pair.mac.memory_gb} GB", f"{pair.budget_bytes / GB:.2f}", str(pair.chunk)]
    for name, figures in pair.sessions.items() if prints_each else ():
        print_row([name, *start, *_cells(figures)])
    print_row([pair.layout.name, *start, *_cells(pair.total)])


def _print_over(pairs: Sequence[PairFigures]) -> None:
    """Print which sessions read more than they should though RAM holds all of them."""
    fitting = [
        (f"{pair.layout.name} on {pair.mac.memory_gb} GB, {name}", figures.read_ratio)
        for pair in pairs
        for name, figures in pair.sessions.items()
        if pair.fits(figures)
    ]
    over = [f"{where} {ratio:.3f}" for where, ratio in fitting if ratio > READ_RATIO_MAX]
    print(f"\n{len(fitting)} sessions fit; above {READ_RATIO_MAX}: {len(over)}")
    for line in over:
        print(f"- {line}")


def _cells(figures: Figures) -> list[str]:
    written = figures.written
    return [
        f"{figures.rows_bytes / GB:.2f}",
        f"{figures.least_bytes / GB:.2f}",
        *(f"{written[kind] / GB:.2f}" for kind in ("rows", "window", "state")),
        f"{figures.write_ratio:.2f}",
        f"{figures.kept_bytes_max / GB:.2f}",
        f"{figures.slot_bytes_max / GB:.2f}",
        f"{figures.read.total() / GB:.2f}",
        f"{figures.read_ratio:.3f}",
        f"{figures.idle / figures.new:.3f}" if figures.new else "",
        str(len(figures.forwards)),
        *(f"{mean(figures.forwards or [0]):.0f}" for mean in (fmean, median)),
        *(f"{figures.short_share(tokens):.0%}" for tokens in SHORT_TOKENS),
        ", ".join(f"{name} {count}" for name, count in figures.refused.items()),
    ]
