"""Plays scripts.chaos and scripts.soak in short: they judge, and what they tell holds.

Memory is not judged here: no plateau is reached in seconds.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hearth.shared.settings_from_env import PROJECT_DIR

TRACES = PROJECT_DIR / "tests" / "data" / "traces"
WAIT_S_MAX = 300  # for what takes 30 s on an idle machine


def report_of(tmp_path: Path, *command: str) -> tuple[dict[str, Any], str]:
    """Run a script with `--json`; return its report and what it printed."""
    told = tmp_path / "report.json"
    with tempfile.TemporaryDirectory(prefix="hearth-") as short:  # a socket's path has a limit
        done = subprocess.run(
            [sys.executable, *command, "--json", str(told)],
            cwd=PROJECT_DIR,
            env=os.environ | {"TMPDIR": short},
            capture_output=True,
            text=True,
            timeout=WAIT_S_MAX,
        )
    assert told.exists(), done.stderr + done.stdout
    return json.loads(told.read_text()), done.stdout


def test_faults_are_played_and_every_request_has_its_one_end(tmp_path: Path) -> None:
    faults = ("worker killed", "disk read-only", "garbage", "half-closing", "smuggling")
    options = ("--minutes", "0.01", "--only", ",".join(faults), "--talks", "1")
    report, told = report_of(tmp_path, "-m", "scripts.chaos", *options)
    assert [miss for miss in report["misses"] if "memory" not in miss] == [], told
    rows = report["faults"]
    for fault in faults:
        assert rows[fault]["times"] == 1 and f"{fault} ..." in told
    assert rows["garbage"]["ends"]["refused"] > 10
    assert rows["smuggling"]["ends"]["refused"] > 60
    assert sum(sum(row["ends"].values()) for row in rows.values()) == report["requests"]
    assert [row["role"] for row in report["memory"]] == ["proxy", "worker 0"]
    assert all(row["rss_after"] > 0 for row in report["memory"])


def test_sessions_are_replayed_and_memory_is_sampled(tmp_path: Path) -> None:
    traces = [str(path) for path in sorted(TRACES.glob("*.xz"))]
    options = ("--minutes", "0.3", "--sample", "1", "--clients", "2")
    report, told = report_of(tmp_path, "-m", "scripts.soak", *traces, *options)
    assert [miss for miss in report["misses"] if "grew" not in miss] == [], told
    assert report["counts"]["answered"] > 0
    assert report["counts"]["cached tokens"] > 0
    assert len(report["samples"]) > 5
    for sample in report["samples"]:
        assert 0 <= sample["kv"] <= sample["kv_budget"] and len(sample["rss"]) == 2
    assert max(sample["kv"] for sample in report["samples"]) > 0
    assert max(sample["disk"] for sample in report["samples"]) > 0
