"""Compares Hearth with other local MLX servers on the same model and the same traces.

One server at a time, three starts each. A cold one (its cache switched off) tells the answers that
a cache must not change. A warm one replays the trace, and is ended as its user would. One that is
started again shows what outlived that, what a cancelled prompt leaves, and the live session. What
was read comes from a meter in each server (attention_counter), not from what the server says; only
a server that somebody else started (--peer NAME=URL) is believed.
"""

import argparse
import asyncio
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hearth.commands.replay.traces import TRACES_DIR, Captured
from scripts.bench.cache import traces
from scripts.bench.peers_figures import Figures
from scripts.bench.peers_report import plots, written
from scripts.bench.peers_servers import HEARTH, PEERS, Peer
from scripts.bench.peers_workload import Course, Ids
from scripts.bench.serve import machine
from scripts.bench.servers import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir

ABOUT = "Hearth beside mlx_lm.server, mlx_vlm.server, vllm-mlx, Rapid-MLX and others by URL"
FIXTURES = "qwen3,qwen3_5,gpt_oss"  # dense, hybrid, window
QUICK_TRACES, QUICK_STEPS = ("pi-session-1", "codex-session-1"), 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fixtures", default=FIXTURES, help=f"default {FIXTURES}")
    parser.add_argument("--tiny", action="store_true", help="two layers: for counts, not times")
    parser.add_argument("--traces", default="", help="names, comma-separated; default all")
    parser.add_argument("--traces-dir", type=Path, default=TRACES_DIR)
    parser.add_argument("--limit", type=int, default=0, help="requests of each trace; 0 = all")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_STEPS} requests of {QUICK_TRACES[0]}, or of {QUICK_TRACES[1]} without it",
    )
    parser.add_argument("--sides", default="", help=f"default all: {','.join(PEERS)}")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL", help="one that runs already"
    )
    parser.add_argument("--json", type=Path, help="default bench/peers-<host>.json")
    parser.add_argument("--report", type=Path, default=PROJECT_DIR / "bench" / "REPORT.md")


def run(options: argparse.Namespace) -> None:
    """Measure, and write JSON and report after each side; rows of earlier runs are kept."""
    if options.quick:
        has_first = (options.traces_dir / f"{QUICK_TRACES[0]}.jsonl.xz").exists()
        options.traces = options.traces or QUICK_TRACES[0 if has_first else 1]
        options.limit = options.limit or QUICK_STEPS
    sides = chosen(options.sides, options.peer)
    out = options.json or PROJECT_DIR / "bench" / f"peers-{platform.node()}.json"
    rows = [Figures.of(row) for row in json.loads(out.read_text())] if out.exists() else []
    for fixture in options.fixtures.split(","):
        model = fixture_dir(fixture, tiny=options.tiny).resolve()
        for captured in traces(options):
            ids: Ids | None = None
            for peer in sides:
                print(f"\n{fixture} {captured[0].trace} {peer.name}", file=sys.stderr)
                made = blank(peer, captured, options, fixture)
                course = Course(peer, model, captured, options.max_tokens)
                with tempfile.TemporaryDirectory(prefix="hearth-peers-") as directory:
                    asyncio.run(course.run(Path(directory)))
                ids = course.ids if peer.name == HEARTH else ids
                made = replace(course.figures(made, ids), version=peer.told_version())
                rows = [row for row in rows if row.key != made.key] + [made]
                save(rows, out, options.report)
    print(f"written to {options.report} and {out}")


def save(rows: Sequence[Figures], out: Path, report: Path) -> None:
    """Write the figures, their report, and its plots; what hands wrote in NOTES.md goes in."""
    for path in (out, report):
        path.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([row.as_json() for row in rows], indent=1) + "\n")
    notes = report.with_name("NOTES.md")
    drawn = plots(rows, report.parent / "plots")
    text = written(rows, drawn, notes.read_text() if notes.exists() else "")
    report.write_text(text)


def chosen(names: str, urls: Sequence[str]) -> list[Peer]:
    """Return what is compared, Hearth first: its ids are what the others are held to."""
    wanted = [name for name in names.split(",") if name] or list(PEERS)
    if odd := sorted(set(wanted) - set(PEERS)):
        raise SystemExit(f"no side {', '.join(odd)}; there are {', '.join(PEERS)}")
    known = [PEERS[name] for name in PEERS if name in wanted]
    for each in urls:
        name, equals, url = each.partition("=")
        if not (name and equals and url):
            raise SystemExit(f"--peer {each} is not NAME=URL, as mine=http://127.0.0.1:8000")
        known.append(Peer(name, url=url.rstrip("/").removesuffix("/v1")))
    return known


def blank(
    peer: Peer, captured: Sequence[Captured], options: argparse.Namespace, fixture: str
) -> Figures:
    """Return a row without figures yet: what is measured, of what, and by which command."""
    told = machine()
    words = [
        "python -m scripts.bench",
        "peers",
        "--fixtures",
        fixture,
        "--traces",
        captured[0].trace,
    ]
    words += ["--limit", str(len(captured)), "--max-tokens", str(options.max_tokens)]
    words += ["--tiny"] if options.tiny else []
    words += ["--peer", f"{peer.name}={peer.url}"] if peer.url else []
    words += ["--sides", HEARTH if peer.url or peer.name == HEARTH else f"{HEARTH},{peer.name}"]
    return Figures(
        side=peer.name,
        fixture=fixture + (" (two layers)" if options.tiny else ""),
        trace=captured[0].trace,
        limit=len(captured),
        command=shlex.join(words),
        server_command=peer.command(),
        version="",  # it may have to be installed first
        machine=f"{told['platform']}, {told['cpu_count']} CPUs",
        commit=told["commit"][:10],
        started=told["started"],
        load=round(os.getloadavg()[0], 1),
    )
