"""Runs other projects' suites against a real Hearth: `python -m scripts.nightly`.

It ends with 0 when all that failed is known and explained, with 1 otherwise.
"""

import argparse
import asyncio
import json
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from scripts.chaos.own_server import OwnServer
from scripts.fixtures.embedding_checkpoints import embedding_checkpoint
from scripts.nightly.known_failures import Judgement, load_rules
from scripts.nightly.run_suites import Night, logged_errors, run_suite
from scripts.nightly.suites import ALIASES, SERVED_NAME, SUITES, Suite
from scripts.nightly.suites_page import PAGE, RUN, page_of

POCKET: Final = "builtin:pocket"
SHOWN_MAX: Final = 10  # failures of a suite, on the terminal
SHOWN_CHARS: Final = 300


def main(words: Sequence[str] | None = None) -> int:
    """Run the suites that are named, or all, and tell what came of them."""
    given = _arguments().parse_args(words)
    if given.page_only:
        PAGE.write_text(page_of(json.loads(RUN.read_text()), load_rules()))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends with us
    chosen = [suite for suite in SUITES if not given.suite or suite.name in given.suite]
    server = OwnServer(settings(given.model))
    try:
        asyncio.run(server.started())
        with tempfile.TemporaryDirectory(prefix="hearth-nightly-") as work_dir:
            night = Night(
                port=server.port,
                work_dir=Path(work_dir),
                sources_dir=given.sources,
                rules=load_rules(),
                is_pocket=given.model == POCKET,
            )
            run = _run(chosen, night)
        is_up = asyncio.run(server.health()).get("status") == "ok"
        logged = logged_errors(server.log.read_text(errors="replace"))
    finally:
        server.close()
    run["server"] = {"is_up": is_up, "logged_errors": len(logged)}
    for line in logged[:SHOWN_MAX]:
        print(f"Hearth logged: {line[:SHOWN_CHARS]}")
    if not is_up:
        print("Hearth does not answer any more.")
    _write(run, given)
    is_good = is_up and not logged and all(row["is_good"] for row in run["suites"])
    print("All that failed is known." if is_good else "The night failed.")
    return 0 if is_good else 1


def settings(model: str) -> dict[str, str]:
    """Return what differs from Hearth's defaults, so that all suites find what they ask for."""
    return {
        "MODEL_PATH": model,
        "PROXY_MODEL_ID": SERVED_NAME,
        "MODEL_ALIASES": ",".join(ALIASES),
        "EMBEDDING_MODEL": str(embedding_checkpoint("bert")),
        # An answer of ten tokens, for which some suites ask, would be all thinking.
        "DEFAULT_THINKING": "false",
        # Whether a model of such a size calls a tool is not to change from night to night.
        "DEFAULT_TEMPERATURE": "0",
        "WORKERS": "1",
    }


def row_of(suite: Suite, judgement: Judgement, seconds: float) -> dict[str, Any]:
    """Return what a run's file says of a suite: counts and names of tests, no texts."""
    return {
        "suite": suite.name,
        "about": suite.about,
        "source": suite.source.label,
        "passed": judgement.passed,
        "known": dict(sorted(judgement.known.items())),
        "unknown": sorted(outcome.test for outcome in judgement.unknown),
        "listed_but_passed": sorted(judgement.listed_but_passed),
        "did_not_run": bool(judgement.error),
        "is_good": judgement.is_good,
        "seconds": round(seconds, 1),
    }


def _run(suites: Sequence[Suite], night: Night) -> dict[str, Any]:
    rows = []
    for suite in suites:
        judgement, seconds = run_suite(suite, night)
        rows.append(row_of(suite, judgement, seconds))
        _tell(suite, judgement, seconds)
    return {"suites": rows}


def _tell(suite: Suite, judgement: Judgement, seconds: float) -> None:
    known, unknown = sum(judgement.known.values()), len(judgement.unknown)
    counts = f"{judgement.passed} passed, {known} known, {unknown} unknown"
    print(f"{suite.name}: {counts}, {seconds:.0f} s", flush=True)
    if judgement.error:
        print(f"  did not run: {judgement.error[-2 * SHOWN_CHARS :]}")
    for outcome in judgement.unknown[:SHOWN_MAX]:
        text = re.sub(r"\s+", " ", outcome.text)[:SHOWN_CHARS]
        print(f"  {outcome.result.value}: {outcome.test}\n    {text}")
    for test in judgement.listed_but_passed[:SHOWN_MAX]:
        print(f"  passes, but is listed as known to fail: {test}")


def _write(run: dict[str, Any], given: argparse.Namespace) -> None:
    text = json.dumps(run, indent=1) + "\n"
    if given.json:
        given.json.write_text(text)
    if given.write:
        whole = merged(json.loads(RUN.read_text()) if RUN.exists() else {"suites": []}, run)
        RUN.write_text(json.dumps(whole, indent=1) + "\n")
        PAGE.write_text(page_of(whole, load_rules()))


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the run `now`, with the rows of suites that only the one `before` has run."""
    rows = {row["suite"]: row for row in (*before["suites"], *now["suites"])}
    return {**now, "suites": [rows[suite.name] for suite in SUITES if suite.name in rows]}


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.nightly", description=__doc__)
    add = parser.add_argument
    add("--suite", action="append", choices=[suite.name for suite in SUITES], help="only this one")
    add("--model", default=POCKET, help="what Hearth serves; as MODEL_PATH")
    add("--sources", type=Path, help="a folder with sdists, or OWNER+NAME/repo git directories")
    add("--json", type=Path, help="write what came of it")
    add(
        "--write",
        action="store_true",
        help=f"write {PAGE.name}; suites that did not run now keep their rows",
    )
    add("--page-only", action="store_true", help=f"write {PAGE.name} from the last run written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
