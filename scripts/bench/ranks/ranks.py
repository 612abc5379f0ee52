"""Measures one model over ranks on loopback: what each holds, and what differs from one rank."""

import argparse
import json
from pathlib import Path
from typing import Any, Final

from hearth.commands.replay.traces import TRACES_DIR
from hearth.commands.server_client import table
from scripts.bench.ranks.families import family_rows
from scripts.bench.ranks.talks import ALL_WEIGHTS, talk_rows
from scripts.bench.ranks.trace_counts import trace_rows
from scripts.fixtures.rank_fixtures import RANKED_NAMES

ABOUT: Final = "one model over 2 and 3 ranks on loopback: families, talks, captured sessions"
PARTS: Final = ("families", "talks", "traces")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(PARTS), help=", ".join(PARTS))
    parser.add_argument("--sizes", default="2,3", help="numbers of ranks")
    parser.add_argument("--families", default="", help="names, comma-separated; else all")
    parser.add_argument("--fixtures", default=",".join(RANKED_NAMES))
    parser.add_argument("--weights", default="", help="float32, bfloat16, 4; else each of them")
    parser.add_argument("--traces", default="", help="names, comma-separated; else all")
    parser.add_argument("--limit", type=int, default=40, help="requests of each trace")
    parser.add_argument("--out", type=Path, help="JSON; parts that are there and not asked stay")


def run(options: argparse.Namespace) -> None:
    sizes = [int(size) for size in options.sizes.split(",")]
    fixtures = options.fixtures.split(",")
    report: dict[str, Any] = {}
    if options.out and options.out.exists():
        report = json.loads(options.out.read_text())
    for part in options.only.split(","):
        if part == "families":
            report[part] = family_rows([n for n in options.families.split(",") if n], sizes)
        elif part == "talks":
            report[part] = talk_rows(fixtures, _weights(options.weights), sizes)
        elif part == "traces":
            paths = _traces(options.traces)
            report[part] = [
                row for name in fixtures for row in trace_rows(paths, name, sizes, options.limit)
            ]
        else:
            raise SystemExit(f"no part {part}; there are {', '.join(PARTS)}")
        print(_lines(report[part]))
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n")


def _weights(asked: str) -> list[Any]:
    """Return the kinds of weights whose dtype or bits are named."""
    names = [name for name in asked.split(",") if name]
    return [w for w in ALL_WEIGHTS if not names or str(w.bits or w.dtype) in names]


def _traces(asked: str) -> list[Path]:
    names = [name for name in asked.split(",") if name]
    found = sorted(TRACES_DIR.glob("*.jsonl.xz"))
    return [path for path in found if not names or path.name.partition(".")[0] in names]


def _lines(rows: list[dict[str, Any]]) -> str:
    heads = list(dict.fromkeys(head for row in rows for head in row))
    return table(heads, [[str(row.get(head, "-")) for head in heads] for row in rows])
