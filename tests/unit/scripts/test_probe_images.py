"""The probes with images: what they show, and what they say of the turn behind it."""

from pathlib import Path

import pytest

from hearth.commands import probe_agent, probe_cache
from tests.helpers.servers.probed_server import FakeServer, Flaws, played

pytestmark = pytest.mark.process


def probed(fake: FakeServer, *arguments: str) -> int:
    arguments = ("--tokens", "1500", *arguments)
    return played(probe_cache.probe_session, probe_cache.options_of, fake, *arguments)


def agent(fake: FakeServer, *arguments: str) -> int:
    return played(probe_agent.agent_probe, probe_agent.options_of, fake, *arguments)


@pytest.fixture
def screenshot(tmp_path: Path) -> str:
    path = tmp_path / "shot.png"
    path.write_bytes(b"any bytes: the server alone reads them")
    return str(path)


@pytest.mark.parametrize("command", ["probe", "agent"])
def test_a_turn_behind_an_image_that_finds_too_little_is_missed_with_its_figures(
    command: str, screenshot: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServer(Flaws(forgets_images=True))
    if command == "probe":
        assert probed(fake, "--only", "image", "--image", screenshot) == 1
    else:
        assert agent(fake, "--slack", "100000", "--image", screenshot) == 1
    out = capsys.readouterr().out
    assert "verdict: MISSED: image: turn 2 hit 0.0000, expected 0.94: " in out
