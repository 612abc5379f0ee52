"""The probes as commands against a real server, on a hybrid; at night on two other kinds."""

import json
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.commands import diff_turns
from hearth.commands.server_client import SLACK_TOKENS, log_lines
from hearth.shared.paths import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.by_day import by_day
from tests.helpers.servers.server import Server

PROBE_S_MAX = 180.0
FIXTURES = (
    "qwen3_5",
    *(pytest.param(name, marks=pytest.mark.night) for name in ("qwen3", "gpt_oss")),
)


@pytest.fixture(scope="module", params=FIXTURES)
def probed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    made = Server(
        MODEL_PATH=str(fixture_dir(request.param)),
        PROXY_MODEL_ID="local",
        LOG_ROOT=str(tmp_path_factory.mktemp("logs")),
        # Without it random weights end a turn with an end token that the template does not write,
        # and a state behind that is of no use.
        DEFAULT_REPETITION_PENALTY="1.08",
    )
    with made as running:
        yield running


def ran(server: Server, script: str, *arguments: str) -> tuple[int, str]:
    """Return the exit status of a script, and what it said."""
    command = [
        sys.executable,
        "-m",
        f"hearth.commands.{script}",
        *arguments,
        "--base-url",
        server.url,
    ]
    done = subprocess.run(
        command, cwd=PROJECT_DIR, capture_output=True, text=True, timeout=PROBE_S_MAX
    )
    return done.returncode, done.stdout + done.stderr


def logs(server: Server) -> list[Path]:
    return sorted(Path(server.environment["LOG_ROOT"]).glob("*/cache-session-probe-*.log"))


@pytest.mark.night
def test_all_four_scenarios_are_good(probed: Server) -> None:
    status, said = ran(probed, "probe_cache")
    assert status == 0, said
    assert "verdict: good: normal, drift, semantic, insertion as expected" in said


@pytest.mark.parametrize("echo", by_day(["verbatim", "stripped", "trimmed"], ["trimmed"]))
def test_an_agents_session_prefills_only_what_is_new(probed: Server, echo: str) -> None:
    status, said = ran(probed, "probe_agent", "--echo", echo)
    assert status == 0, said
    assert "verdict: good: 12 requests" in said


@pytest.mark.night
def test_every_loss_of_every_session_is_explained_in_its_log(probed: Server) -> None:
    assert ran(probed, "probe_agent", "--turns", "2")[0] == 0
    assert logs(probed)
    for path in logs(probed):
        assert diff_turns.judge(log_lines(path), SLACK_TOKENS) == 0, path.read_text()


def test_the_log_is_the_owners_alone_and_holds_no_text_of_prompts(probed: Server) -> None:
    assert ran(probed, "probe_agent", "--turns", "2")[0] == 0
    for path in logs(probed):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert "Working directory" not in path.read_text()
        for row in map(json.loads, path.read_text().splitlines()):
            assert not {"was", "now"} & (row["divergence"] or {}).keys()
