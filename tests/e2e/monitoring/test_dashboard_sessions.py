"""Checks that a person can tell forty conversations of twelve clients apart on the dashboard.

Their pictures go to HEARTH_ARTEFACTS, or to the test's own directory.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.clients.browser import NEEDS_CHROMIUM, chromium, page
from tests.helpers.clients.twelve_clients import CLIENTS, Conversation, conversations, lead
from tests.helpers.servers.server import Server

pytestmark = NEEDS_CHROMIUM
COUNT = 40
SCREEN = (1280, 900)
CARDS = """[...document.querySelectorAll('.tree')].map((t) => [
  t.querySelector('h3').textContent, t.querySelector('.about').textContent])"""


@dataclass
class Seen:
    led: list[Conversation] = field(default_factory=list)
    cards: list[tuple[str, str]] = field(default_factory=list)
    height: int = 0  # of all cards together, in pixels
    losses: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)  # of /v1/sessions
    logs: str = ""
    errors: list[str] = field(default_factory=list)


async def watch(url: str, devtools: str, seen: Seen, artefacts: Path) -> None:
    async with page(devtools) as tab:
        await tab.look(*SCREEN, "light")
        await tab.open(f"{url}/dashboard")
        await tab.until(f"document.querySelectorAll('.tree').length === {COUNT}")
        await tab.until("!document.getElementById('losses').hidden")
        seen.cards = [(title, about) for title, about in await tab.value(CARDS)]
        seen.height = await tab.value("document.getElementById('trees').offsetHeight")
        seen.losses = await tab.value(
            "[...document.querySelectorAll('#loss-rows li')].map((each) => each.textContent)"
        )
        await tab.shoot(artefacts / "forty-sessions.png")
        seen.errors = list(tab.errors)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    artefacts = Path(os.environ.get("HEARTH_ARTEFACTS") or tmp_path_factory.mktemp("sessions"))
    artefacts.mkdir(parents=True, exist_ok=True)
    told = Seen(led=list(conversations(COUNT)))
    with Server() as server, chromium() as devtools:
        for each in told.led:
            lead(server.url, each)
        told.rows = server.get("/v1/sessions")["sessions"]
        asyncio.run(watch(server.url, devtools, told, artefacts))
        server.stop()
        files = [path for path in server.run_dir.rglob("*") if path.is_file()]
        told.logs = "".join(path.read_text(errors="replace") for path in files if is_log(path))
    yield told


def is_log(path: Path) -> bool:
    return path.name == "log" or path.suffix == ".log"


def test_every_conversation_is_told_by_its_first_words_and_its_client(seen: Seen) -> None:
    shown = {title: about for title, about in seen.cards}
    assert set(shown) == {each.title for each in seen.led}
    for each in seen.led:
        assert shown[each.title].startswith(each.client), each
        turns = f" · {each.turns} {'turn' if each.turns == 1 else 'turns'}"
        assert turns in shown[each.title], each
    assert {each.client for each in seen.led} == set(CLIENTS)
    assert seen.errors == []


def test_forty_conversations_take_one_screen(seen: Seen) -> None:
    assert 0 < seen.height <= SCREEN[1]


def test_the_first_screen_says_what_was_lost_by_whom_and_why(seen: Seen) -> None:
    assert seen.losses and all("system prompt" in each for each in seen.losses)
    titles = [each.title for each in seen.led]
    assert all(any(title in each for title in titles) for each in seen.losses)


def test_each_has_an_id_of_its_own_that_says_whose_it_is(seen: Seen) -> None:
    ids = [row["session"] for row in seen.rows]
    assert len(set(ids)) == len(ids) == COUNT
    assert {row["client"] for row in seen.rows} == set(CLIENTS)
    assert sum(each.startswith("curl-") for each in ids) == COUNT // len(CLIENTS)


def test_no_title_is_in_a_log(seen: Seen) -> None:
    assert "ready model=local" in seen.logs
    assert [each.title for each in seen.led if each.title in seen.logs] == []
