#!/usr/bin/env python
"""Checks that no prompt hides a change which its client has made in what was said before.

    python -m scripts.mutate_traces [TRACE ...] [--families qwen3,harmony] [--sample N]
    python -m scripts.mutate_traces [TRACE ...] --edits 500

Sessions are primed with a captured session. Then each string that means something is changed in the
raw body of the last request that has it, and messages, tools and parts of them come, go and change;
the prompt that comes of it is held to what sessions that know nothing make of the same
(hidden_changes.py). With --edits N, only N random edits that a person could make on purpose are
tried, over all traces together (deliberate_edits.py).
Exit status 0: nothing is hidden; 1: something is; 2: there is no trace.
"""

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from hearth.commands.replay.traces import TRACES_DIR
from scripts.harness.captured_sessions import load
from scripts.harness.changes.hidden_changes import EXEMPT, FIXTURES, Proof, Verdict


def prove(proof: Proof, name: str, sample: int, edit_count: int) -> list[Verdict]:
    """Try every change, or `sample` of each sort; where `edit_count` is not 0, so many edits only.

    Tell what each outcome came to, and what hides something.
    """
    began, verdicts = time.monotonic(), list[Verdict]()
    for what, verdict in itertools.chain(
        () if edit_count else proof.unchanged(),
        () if edit_count else ((m, proof.mutated(m)) for m in sampled(proof.mutations(), sample)),
        ((edit, proof.edited(edit)) for edit in sampled(proof.edits(edit_count), sample)),
    ):
        verdicts.append(verdict)
        if verdict.finding:
            print(f"{name}: {what}: {verdict.finding}", flush=True)
    outcomes = Counter(verdict.outcome for verdict in verdicts).most_common()
    rows = ", ".join(f"{outcome} {count:,}" for outcome, count in outcomes)
    print(f"{name}: {len(verdicts):,} in {time.monotonic() - began:.0f} s: {rows}", flush=True)
    return verdicts


def sampled(rows: list[Any], count: int, seed: int = 7) -> list[Any]:
    """Return `count` of the rows (0 = all), the same ones each time."""
    return random.Random(seed).sample(rows, count) if 0 < count < len(rows) else rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE", help="default: all")
    parser.add_argument("--families", default="qwen3_5", help=f"of {','.join(FIXTURES)}")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="of each sort; 0 = all")
    parser.add_argument("--edits", type=int, default=0, metavar="N", help="deliberate edits")
    options = parser.parse_args()
    paths = options.traces or sorted(TRACES_DIR.glob("*.jsonl.xz"))
    if not paths:
        parser.error(f"there are no traces in {TRACES_DIR}")
    pairs = list(itertools.product(paths, options.families.split(",")))
    verdicts = list[Verdict]()
    with tempfile.TemporaryDirectory() as logs:
        for path, family_name in pairs:
            session, edit_count = load(path), -(-options.edits // len(pairs))
            proof = Proof(session, family_name, Path(logs))
            name = f"{session[0].row.trace} {family_name}"
            verdicts += prove(proof, name, options.sample, edit_count)
    counts = Counter(verdict.outcome for verdict in verdicts)
    for outcome, why in EXEMPT.items():
        if counts[outcome]:
            print(f"  {outcome} ({counts[outcome]:,}): {why}")
    hidden = sum(bool(verdict.finding) for verdict in verdicts)
    print(f"{len(verdicts):,} prompts, {hidden:,} hide something")
    return 1 if hidden else 0


if __name__ == "__main__":
    sys.exit(main())
