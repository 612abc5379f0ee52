"""Random conversations over two ranks in two processes, warm against cold, and against one rank.

`python -m scripts.faults ranks` plays many.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hearth.shared.paths import PROJECT_DIR
from scripts.fixtures.fixture_cache import RANKED_NAMES, mlx_environment
from tests.helpers.by_day import by_day

pytestmark = pytest.mark.process

WAIT_S_MAX = 240.0  # for what takes 10 s on an idle machine


def soaked(directory: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the soak; return its exit code, what it told, and what it said beside."""
    out = directory / "told.json"
    run = subprocess.run(
        [sys.executable, "-m", "scripts.faults", "ranks", "--json", str(out), *arguments],
        cwd=PROJECT_DIR,
        env=mlx_environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        check=False,
    )
    told = json.loads(out.read_text()) if out.exists() else {}
    return run.returncode, told, run.stdout + run.stderr


@pytest.mark.parametrize("count", by_day((1, len(RANKED_NAMES)), (1,)))
def test_on_two_ranks_warm_is_cold_and_cold_is_what_one_rank_says(
    count: int, tmp_path: Path
) -> None:
    """In exact mode and by default, with files; a dense, a hybrid and a window model at night."""
    code, told, said = soaked(tmp_path, "--episodes", str(count), "--seed", "7")
    assert code == 0, said
    assert told["episodes"] == count
    assert told["prompts warm"] > count
    assert told["as one rank says"] == told["prompts cold"] > count
    assert told["tokens read back"] > 0


@pytest.mark.night  # it looks at the clock
def test_an_operation_that_was_not_told_is_found_within_two_seconds(tmp_path: Path) -> None:
    """Rank 0 waits in a sum for a rank that waits for an operation: neither would ever end."""
    code, told, said = soaked(tmp_path, "--plant", "dropped")
    assert code == 0, said
    assert "an operation was not told" in told["failure"]
    assert told["found_s"] <= 2.0
