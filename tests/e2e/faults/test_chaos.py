"""Plays scripts.faults in short: it judges, and what it tells holds.

Memory is not judged here: no plateau is reached in seconds.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.paths import PROJECT_DIR
from scripts.faults.load import SHARES

pytestmark = pytest.mark.night  # minutes: `scripts.faults` itself, with a load of every kind

WAIT_S_MAX = 300  # for what takes 30 s on an idle machine


def report_of(tmp_path: Path, *options: str) -> tuple[dict[str, Any], str]:
    """Run a subcommand with `--json`; return its report and what it printed."""
    told = tmp_path / "report.json"
    with tempfile.TemporaryDirectory(prefix="hearth-") as short:  # a socket's path has a limit
        done = subprocess.run(
            [sys.executable, "-m", "scripts.faults", *options, "--json", str(told)],
            cwd=PROJECT_DIR,
            env=os.environ | {"TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=WAIT_S_MAX,
        )
    assert told.exists(), done.stderr + done.stdout
    return json.loads(told.read_text()), done.stdout


def test_faults_are_played_and_every_request_has_its_one_end(tmp_path: Path) -> None:
    faults = ("worker killed", "disk full", "flood")
    only = [word for fault in faults for word in ("--only", fault)]
    report, told = report_of(tmp_path, "chaos", "--minutes", "0.01", *only)
    assert [miss for miss in report["misses"] if "memory" not in miss] == [], told
    assert report["times"] == dict.fromkeys(faults, 1)
    assert all(f"{fault} ..." in told for fault in faults)
    ends = report["ends"]
    assert set(ends["smuggling"]) == set(ends["malformed"]) == {"refused"}
    assert ends["half-closing"]["answered"] > 0 and ends["page"]["answered"] > 10
    kinds = {name: sum(row.values()) for name, row in ends.items()}
    assert sum(kinds[name] for name in SHARES if name in kinds) + kinds["Hi"] == report["requests"]
    assert [row["role"] for row in report["memory"]] == ["proxy", "worker 0"] * 2
    assert all(row["rss"] > 0 for row in report["memory"])
