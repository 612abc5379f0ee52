"""The dashboard in a real browser, while agents talk to the server: what it shows, and to whom.

One replay is watched, and looked at from all sides; its pictures go to HEARTH_ARTEFACTS, or to the
test's own directory.
"""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from hearth.commands import probe_agent
from hearth.commands.server_client import CHAT, server_of
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.clients.browser import NEEDS_CHROMIUM, Page, chromium, page
from tests.helpers.servers.server import Server

pytestmark = NEEDS_CHROMIUM
KEY = "the-key"
SESSION = "edited <b>&amp;"  # what a client calls a session is text, whatever it looks like
LOOKS = {"light": (1180, 900, "light"), "dark": (1180, 900, "dark"), "phone": (360, 740, "light")}
CHECKS = (Path(__file__).parents[2] / "helpers" / "clients" / "page_checks.js").read_text()
FOCUS_MAX = 40  # presses of Tab
NAMED = {"button", "link", "textbox", "image", "figure", "region", "table", "meter", "heading"}
FOCUSED = """(() => {
  const at = document.activeElement;
  return at === document.body ? "" : at.tagName + " " + (at.getAttribute("aria-label") ??
    at.textContent).trim().slice(0, 60);
})()"""
LOST = "[...document.querySelectorAll('.turns button')].find((b) => b.ariaLabel.includes('Lost'))"
CHARTS = """[...document.querySelectorAll('figure')].map(
  (f) => [f.querySelector('b').textContent, f.dataset.last])"""
ROWS = """[...document.querySelectorAll('#request-rows tr')].map(
  (r) => [...r.cells].map((c) => c.textContent))"""
BARS = "[...document.querySelectorAll('.turns button')].map((b) => b.ariaLabel)"
TITLES = "[...document.querySelectorAll('.tree h3')].map((h) => h.textContent)"
TURNS = "document.querySelectorAll('.turns button').length"
CHECKED = "({text: checks.text(), bars: checks.bars(), overflow: checks.overflow()})"


def pause(ms: int) -> str:
    """Return the script that waits so long: for a chart to be drawn, for a second's news."""
    return f"new Promise((done) => setTimeout(done, {ms}))"


def card(name: str) -> str:
    return f"document.getElementById('{name}').dataset.value"


@dataclass
class Seen:
    """What one replay showed."""

    costs: list[dict[str, int]] = field(default_factory=list)  # as clients were told
    cards: dict[str, str] = field(default_factory=dict)  # id -> raw value
    charts: dict[str, str] = field(default_factory=dict)  # title -> JSON of its last values
    table: list[list[str]] = field(default_factory=list)
    bars: list[str] = field(default_factory=list)  # their names
    titles: list[str] = field(default_factory=list)  # of sessions
    text: str = ""
    metrics: str = ""
    cache: dict[str, Any] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)
    looks: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: list[tuple[str, str]] = field(default_factory=list)
    focus: list[str] = field(default_factory=list)
    roved: list[str] = field(default_factory=list)
    focus_kept: tuple[str, str] = ("", "")  # before and after its session was drawn anew
    tip: str = ""
    tip_after_escape: bool = True
    live: int = 0  # how many requests the page showed while others were still to come
    sign_in: dict[str, Any] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    after_stop: str = ""  # the status, once the server was gone


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def talk(url: str, seen: asyncio.Event) -> list[dict[str, int]]:
    """Play an agent with two sub-agents, then a session that edits its past; return the costs.

    The second begins once somebody has seen the first, so that it is watched while it goes on.
    """
    arguments = ["--base-url", url, "--key", KEY, "--turns", "4", "--model", "local"]
    options = probe_agent.options_of(arguments)
    async with server_of(options) as asked:
        costs = await probe_agent.play(asked, options, [])
        rows = [{"cached": each.cached, "prefilled": each.prefilled} for each in costs]
        await seen.wait()
        text = "The fox jumps. " * 30
        messages = [user("One. " + text), {"role": "assistant", "content": "Yes."}, user("Two.")]
        edited = [user("Edited. " + text), *messages[1:]]
        for each in (messages[:1], messages, edited):
            body = {"messages": each, "max_tokens": 4, "session_id": SESSION}
            tokens = (await asked.ask(CHAT, body, {})).tokens
            rows.append({"cached": tokens.cached, "prefilled": tokens.prefilled})
    return rows


async def sign_in(tab: Page, url: str, artefacts: Path) -> dict[str, Any]:
    """Come in as a person does, with the keyboard; the first try is wrong."""
    await tab.look(*LOOKS["phone"])
    await tab.open(f"{url}/dashboard")
    await tab.value(CHECKS)
    told = {"focus": await tab.value("document.activeElement.id"), "names": await tab.names()}
    told["short"] = (await tab.value("checks.text()"))["short"]
    await tab.write("wrong")
    await tab.press("Enter", "\r")
    told["refusal"] = await tab.until("document.getElementById('wrong')?.textContent")
    await tab.shoot(artefacts / "dashboard-sign-in.png")
    told["errors"] = list(tab.errors)
    tab.errors.clear()  # the 401 that was asked for
    await tab.value("document.getElementById('key').focus()")
    await tab.write(KEY)
    await tab.press("Enter", "\r")
    await tab.until("document.getElementById('status')?.textContent.startsWith('Live')")
    told["cookie"] = await tab.value("document.cookie")
    return told


async def look_around(tab: Page, seen: Seen, artefacts: Path) -> None:
    await tab.value(CHECKS)
    for name, look in LOOKS.items():
        await tab.look(*look)
        has_scheme = f"matchMedia('(prefers-color-scheme: {look[2]})').matches"
        await tab.until(f"innerWidth === {look[0]} && {has_scheme}")
        await tab.value(pause(300))
        await tab.shoot(artefacts / f"dashboard-{name}.png")
        seen.looks[name] = await tab.value(CHECKED)


async def go_by_keyboard(tab: Page, seen: Seen) -> None:
    """Press Tab from the top of the page, then go along the turns of the line that lost."""
    await tab.value("document.activeElement.blur()")
    for _ in range(FOCUS_MAX):
        await tab.press("Tab")
        if not (at := await tab.value(FOCUSED)):
            break
        seen.focus.append(at)
    await tab.value(f"{LOST}.focus()")
    seen.tip = await tab.value("document.getElementById('tip').textContent")
    await tab.press("Escape")
    seen.tip_after_escape = not await tab.value("document.getElementById('tip').hidden")
    await tab.value("document.querySelector('.turns:has(button + *, li + li) button').focus()")
    for key in ("Home", "ArrowRight", "End", "ArrowLeft"):
        await tab.press(key)
        seen.roved.append(await tab.value(FOCUSED))


async def go_on(tab: Page, seen: Seen, http: httpx.AsyncClient) -> None:
    """Have the session that is read go on, so that it is drawn anew under the reader's focus."""
    await tab.value(f"{LOST}.focus()")
    before = await tab.value(FOCUSED)
    body = {"model": "local", "messages": [user("More.")], "max_tokens": 2, "session_id": SESSION}
    (await http.post(CHAT, json=body, timeout=60)).raise_for_status()
    await tab.until(f"{TURNS} === {len(seen.costs) + 1}")
    seen.focus_kept = (before, await tab.value(FOCUSED))


async def read_values(tab: Page, seen: Seen, http: httpx.AsyncClient) -> None:
    """Take what the page says, and what the API says of the same."""
    seen.cards = {
        name: await tab.value(card(name)) for name in ("hit", "saved", "seconds", "count")
    }
    seen.charts = dict(await tab.value(CHARTS))
    seen.table = await tab.value(ROWS)
    seen.bars = await tab.value(BARS)
    seen.titles = await tab.value(TITLES)
    seen.text = await tab.value("document.body.innerText")
    seen.metrics = (await http.get("/metrics")).raise_for_status().text
    seen.cache = (await http.get("/v1/cache")).json()["workers"][0]
    for row in (await http.get("/v1/sessions")).json()["sessions"]:
        told = await http.get(f"/v1/sessions/{row['session']}")
        seen.lines += [line for line in told.json()["lines"] if line not in seen.lines]


async def watched(server: Server, devtools: str, artefacts: Path) -> Seen:
    seen = Seen()
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        page(devtools) as tab,
        httpx.AsyncClient(base_url=server.url, headers=headers) as http,
    ):
        seen.sign_in = await sign_in(tab, server.url, artefacts)
        has_seen = asyncio.Event()
        talking = asyncio.create_task(talk(server.url, has_seen))
        await tab.until(f"Number({card('count')}) >= 2")
        seen.live = int(await tab.value(card("count")))
        has_seen.set()
        seen.costs = await talking
        await tab.until(f"Number({card('count')}) === {len(seen.costs)}")
        await tab.until(f"{TURNS} === {len(seen.costs)}")
        await tab.value("document.getElementById('requests').open = true")
        await tab.value("document.getElementById('entries').open = true")
        await tab.value(pause(2500))
        await read_values(tab, seen, http)
        await look_around(tab, seen, artefacts)
        seen.names = await tab.names()
        await go_by_keyboard(tab, seen)
        await go_on(tab, seen, http)
        seen.errors = list(tab.errors)
        await asyncio.to_thread(server.stop)
        seen.after_stop = await tab.until("document.querySelector('#status.bad')?.textContent")
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    artefacts = Path(os.environ.get("HEARTH_ARTEFACTS") or tmp_path_factory.mktemp("dashboard"))
    artefacts.mkdir(parents=True, exist_ok=True)
    settings = {"PROXY_API_KEY": KEY, "PROXY_MODEL_ID": "local"}
    made = Server(MODEL_PATH=str(fixture_dir("qwen3")), **settings)
    with made as server, chromium() as devtools:
        yield asyncio.run(watched(server, devtools, artefacts))


def total(metrics: str, name: str) -> float:
    """Return a metric's sum over its labels."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
    assert found, f"/metrics has no {name}"
    return sum(map(float, found))


def test_the_page_shows_requests_while_others_are_to_come_and_its_console_stays_clean(
    seen: Seen,
) -> None:
    assert 2 <= seen.live < len(seen.costs)
    assert seen.errors == []


def test_the_cards_say_what_clients_were_told_and_what_metrics_tell(seen: Seen) -> None:
    cached, prefilled = (sum(row[name] for row in seen.costs) for name in ("cached", "prefilled"))
    assert cached > 0
    assert float(seen.cards["saved"]) == cached == total(seen.metrics, "hearth_cached_tokens_total")
    assert prefilled == total(seen.metrics, "hearth_prefilled_tokens_total")
    assert f"{prefilled:,} were read" in seen.text
    prompt = total(seen.metrics, "hearth_prompt_tokens_total")
    assert float(seen.cards["hit"]) == pytest.approx(cached / prompt)
    assert f"{100 * cached / prompt:.1f} %" in seen.text
    ended = total(seen.metrics, "hearth_requests_total")
    assert float(seen.cards["count"]) == len(seen.costs) == ended
    assert float(seen.cards["seconds"]) > 0


def test_charts_and_table_show_each_request_as_its_client_was_told(seen: Seen) -> None:
    told = sorted((row["cached"], row["prefilled"]) for row in seen.costs)
    shown = [tuple(int(cell.replace(",", "")) for cell in row[3:5]) for row in seen.table]
    assert sorted(shown) == told
    assert [int(row[0]) for row in seen.table] == list(range(len(told), 0, -1))
    whole, *by_source = json.loads(seen.charts["Cached and prefilled tokens"])
    cached, prefilled = shown[0]
    assert whole == cached + prefilled
    assert sum(value or 0 for value in by_source) == cached
    budget, used, live = json.loads(seen.charts["Memory of kept KV and live slots"])
    told = [seen.cache[name] for name in ("budget_bytes", "bytes", "slots_bytes")]
    assert [budget, used, live] == told
    assert budget == total(seen.metrics, "hearth_cache_budget_bytes")


def test_every_turn_of_every_session_is_a_bar_with_words(seen: Seen) -> None:
    turns = [turn for line in seen.lines for turn in line["requests"]]
    assert len(turns) == len(seen.costs) == len(seen.bars)
    for turn in turns:
        words = f"Turn {turn['turn']}: {turn['prompt']:,} tokens. {turn['cached']:,} cached"
        assert any(
            name.startswith(words) and f"{turn['prefilled']:,} prefilled" in name
            for name in seen.bars
        ), words
    assert any(each.startswith("One. The fox jumps.") for each in seen.titles)
    assert SESSION in seen.text, "a session's id is text"


def test_a_loss_is_told_in_words_beside_its_bar_and_on_focus(seen: Seen) -> None:
    turns = [turn for line in seen.lines for turn in line["requests"]]
    (loss,) = [turn["divergence"] for turn in turns if turn["divergence"]]
    assert loss["cause"] == "message edited"
    words = f"{loss['lost']:,} tokens to: message edited (message {loss['message'] + 1})"
    assert words in seen.text
    assert words in seen.tip
    assert loss["remedy"] in seen.tip
    assert sum("Lost " in name for name in seen.bars) == 1
    assert not seen.tip_after_escape


@pytest.mark.parametrize("look", LOOKS)
def test_text_and_bars_stand_out_and_nothing_leaves_the_window(seen: Seen, look: str) -> None:
    told = seen.looks[look]
    assert told["text"]["count"] > 40
    assert told["text"]["short"] == []
    assert told["bars"]["count"] > len(seen.bars)
    assert told["bars"]["short"] == []
    assert told["overflow"] == 0


def test_a_screen_reader_is_told_a_name_for_all_that_has_a_part(seen: Seen) -> None:
    roles = {role for role, _ in seen.names}
    assert {"main", "banner", "status", "image", "button", "table", "meter"} <= roles
    nameless = [role for role, name in seen.names if role in NAMED and not name.strip()]
    assert nameless == []
    images = [name for role, name in seen.names if role == "image"]
    assert any(re.match(r"Time to first token: last .+, median ", name) for name in images)


def test_the_tab_key_reaches_all_there_is_and_a_line_is_one_stop(seen: Seen) -> None:
    assert seen.focus[0].startswith("A Skip to sessions")
    turns = [at for at in seen.focus if at.startswith("BUTTON Turn ")]
    assert len(turns) == len(seen.lines)
    assert any(at.startswith("SUMMARY") for at in seen.focus)
    assert sum(at.startswith("DIV") for at in seen.focus) == 2, "tables scroll by keyboard too"
    first, second, last, before_last = seen.roved
    assert first.startswith("BUTTON Turn 1")
    assert second.startswith("BUTTON Turn 2")
    assert before_last != last


def test_a_session_that_goes_on_leaves_the_focus_where_it_was(seen: Seen) -> None:
    before, after = seen.focus_kept
    assert before.startswith("BUTTON Turn 1")
    assert after == before


def test_a_page_whose_server_is_gone_says_so(seen: Seen) -> None:
    assert "connection is lost" in seen.after_stop


def test_a_key_is_asked_for_in_a_form_that_tells_a_wrong_one(seen: Seen) -> None:
    told = seen.sign_in
    assert told["focus"] == "key"
    assert ("textbox", "API key") in [tuple(row) for row in told["names"]]
    assert ("button", "Show the dashboard") in [tuple(row) for row in told["names"]]
    assert told["refusal"] == "This key is not accepted."
    assert told["cookie"] == "", "no script reads it"
    assert told["short"] == []
    assert all("401" in error for error in told["errors"])
