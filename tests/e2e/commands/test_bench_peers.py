"""The peers of scripts.bench: Hearth and mlx_lm.server run its whole course, both reported."""

import json
import lzma
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hearth.shared.settings_from_env import PROJECT_DIR
from scripts.bench.peers_figures import Figures

WAIT_S_MAX = 600  # for what takes 40 s on an idle machine
WORDS = " ".join(f"word{number}" for number in range(300))
SYSTEM = {"role": "system", "content": f"Be brief. {WORDS}"}
QUESTION = {"role": "user", "content": "What is said?"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory in which the command has left its figures and its report."""
    directory = tmp_path_factory.mktemp("peers")
    asked = {
        "t": 0.0,
        "t_end": 0.1,
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": {},
        "body": {"messages": [SYSTEM, QUESTION]},
        "response": None,
    }
    (directory / "pi-session-1.jsonl.xz").write_bytes(lzma.compress(json.dumps(asked).encode()))
    kernels = (
        Path(tempfile.gettempdir()) / "mlx"
    )  # compiled for the other tests: compiling takes half
    kernels.mkdir(exist_ok=True)
    (directory / "mlx").symlink_to(kernels)
    command = ["-m", "scripts.bench", "peers", "--quick", "--tiny", "--fixtures", "qwen3"]
    command += ["--limit", "1", "--sides", "hearth,mlx_lm", "--traces-dir", str(directory)]
    command += ["--json", str(directory / "peers.json")]
    done = subprocess.run(
        [sys.executable, *command, "--report", str(directory / "REPORT.md")],
        cwd=PROJECT_DIR,
        env={**os.environ, "TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


def test_every_figure_of_both_servers_is_measured(made: Path) -> None:
    rows = [Figures.of(row) for row in json.loads((made / "peers.json").read_text())]
    assert [row.side for row in rows] == ["hearth", "mlx_lm"]
    for row in rows:
        assert row.errors == () and (row.failed, row.refused) == (0, 0)
        (step,) = row.steps
        assert row.is_metered and step.prompt - 2 <= step.prefilled <= step.prompt
        assert step.ideal == step.ideal_prompt, "nothing was sent before it"
        assert (row.equal, row.compared) == (1, 1), "the cold answer, and read whole"
        for probe in (row.after_restart, row.after_cancel, row.live):
            assert probe is not None and probe.prompt > 300
        assert row.memory_mb is not None and row.memory_mb > 50
        assert row.cold_ttft_p50_s is not None
    hearth, mlx_lm = rows
    assert hearth.after_restart is not None and mlx_lm.after_restart is not None
    assert hearth.after_restart.prefilled < 32, "the disk tier outlives a restart"
    assert mlx_lm.after_restart.prefilled > 300, "mlx_lm.server keeps nothing, and the meter sees"
    assert hearth.live is not None and hearth.live.hit < 0.1, "the salt makes a session new"


def test_the_report_names_both_and_how_each_was_made(made: Path) -> None:
    text = (made / "REPORT.md").read_text()
    assert "|  | hearth | mlx_lm |" in text and "## qwen3 (two layers), pi-session-1" in text
    assert "--sides hearth,mlx_lm" in text and "python -m mlx_lm server" in text
    (plot,) = (made / "plots").iterdir()
    assert f"(plots/{plot.name})" in text


def test_nothing_is_left_behind(made: Path) -> None:
    assert not list(made.glob("hearth-*")), "the servers' directories"
