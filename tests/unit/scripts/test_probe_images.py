"""The probes with images: what they show, and what they say of the turn behind it."""

import json
import re
from pathlib import Path
from typing import Any

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


def test_an_image_is_shown_in_a_conversation_of_its_own_and_judged_by_the_turn_behind_it(
    screenshot: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServer()
    assert probed(fake, "--image", screenshot, "--image", screenshot) == 0
    out = capsys.readouterr().out
    assert "verdict: good: normal, drift, semantic, insertion, image as expected" in out
    assert re.search(r"image +turn 2, words behind it +[\d,]+ +[\d,]+ +\d+ +0\.9\d+\n", out)
    assert re.search(r"vlm_retreat +0 +0\n", out)
    first, second = (body["messages"] for body, _ in fake.asked[-2:])
    kinds = [block["type"] for block in first[0]["content"]]
    assert kinds == ["image", "image", "text"] and second[0] == first[0]
    assert first[0]["content"][0]["source"]["media_type"] == "image/png"


def test_without_an_image_no_scenario_shows_one() -> None:
    fake = FakeServer(Flaws(reads_text_only=True))
    assert probed(fake) == 0
    assert "image" not in json.dumps([body["messages"] for body, _ in fake.asked])


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


def test_an_agents_first_task_shows_the_image(screenshot: str) -> None:
    fake = FakeServer()
    assert agent(fake, "--image", screenshot, "--image-hit", "0.5") == 0
    shown = fake.asked[0][0]["messages"][1]["content"]
    assert shown[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert shown[1] == {"type": "text", "text": probe_agent.TASKS[0]}


@pytest.mark.parametrize(
    ("path", "flaws", "told"),
    [
        ("shot.png", Flaws(reads_text_only=True), "tiny reads text only"),
        ("missing.png", Flaws(), "missing.png cannot be read"),
        ("notes.txt", Flaws(), "is no image by its name"),
    ],
)
def test_an_image_that_cannot_be_shown_leaves_nothing_to_judge(
    path: str, flaws: Flaws, told: str, screenshot: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = str(Path(screenshot).with_name(path))
    for play in (probed, agent):
        fake = FakeServer(flaws)
        assert play(fake, "--image", named) == 2
        assert told in capsys.readouterr().err and not fake.asked


@pytest.mark.parametrize(
    ("options_of", "arguments", "told"),
    [
        (probe_cache.options_of, ["--only", "image"], "needs an --image PATH"),
        (probe_agent.options_of, ["--turns", "1", "--image", "a.png"], "use 2 or more"),
    ],
)
def test_options_that_leave_no_image_turn_to_judge_are_refused(
    options_of: Any, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options_of(arguments)
    assert told in capsys.readouterr().err
