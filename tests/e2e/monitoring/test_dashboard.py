"""The dashboard in a real browser, while agents talk to the server: what it shows, and to whom.

One replay is watched, and looked at from all sides. What the page makes of any figure is
test_dashboard_page.py's; here its figures are the server's.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
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
CARDS = """Object.fromEntries(['hit', 'saved', 'seconds', 'count'].map(
  (name) => [name, Number(document.getElementById(name).dataset.value)]))"""
COUNT = "Number(document.getElementById('count').dataset.value)"
BARS = "[...document.querySelectorAll('.turns button')].map((b) => b.ariaLabel)"
TITLES = "[...document.querySelectorAll('.tree h3')].map((h) => h.textContent)"
MEMORY = "Memory of kept KV and live slots"
TURNS = "document.querySelectorAll('.turns button').length"
CHECKED = "({text: checks.text(), bars: checks.bars(), overflow: checks.overflow()})"
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
FIRST = "document.querySelector('.turns:has(button + *, li + li) button').focus()"
Seen = dict[str, Any]  # what one replay showed, by what was looked at


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


async def sign_in(tab: Page, url: str) -> Seen:
    """Come in as a person does, with the keyboard; the first try is wrong."""
    await tab.look(*LOOKS["phone"])
    await tab.open(f"{url}/dashboard")
    await tab.value(CHECKS)
    told = {"focus": await tab.value("document.activeElement.id"), "names": await tab.names()}
    told["short"] = (await tab.value("checks.text()"))["short"]
    await tab.write("wrong")
    await tab.press("Enter", "\r")
    told["refusal"] = await tab.until("document.getElementById('wrong')?.textContent")
    told["errors"] = [each for each in tab.errors if "401" not in each]
    tab.errors.clear()  # the 401 that was asked for
    await tab.value("document.getElementById('key').focus()")
    await tab.write(KEY)
    await tab.press("Enter", "\r")
    await tab.until("document.getElementById('status')?.textContent.startsWith('Live')")
    return told | {"cookie": await tab.value("document.cookie")}


async def go_by_keyboard(tab: Page, seen: Seen) -> None:
    """Press Tab from the top of the page, then go along the turns of the line that lost."""
    await tab.value("document.activeElement.blur()")
    for _ in range(FOCUS_MAX):
        await tab.press("Tab")
        seen["focus"].append(await tab.value(FOCUSED))
        if not seen["focus"][-1]:
            break
    await tab.value(f"{LOST}.focus()")
    seen["tip"] = await tab.value("document.getElementById('tip').textContent")
    await tab.press("Escape")
    seen["tip is gone"] = await tab.value("document.getElementById('tip').hidden")
    await tab.value(FIRST)
    for key in ("Home", "ArrowRight", "End", "ArrowLeft"):
        await tab.press(key)
        seen["roved"].append(await tab.value(FOCUSED))


async def go_on(tab: Page, seen: Seen, http: httpx.AsyncClient) -> None:
    """Have the session that is read go on, so that it is drawn anew under the reader's focus."""
    await tab.value(f"{LOST}.focus()")
    before = await tab.value(FOCUSED)
    body = {"model": "local", "messages": [user("More.")], "max_tokens": 2, "session_id": SESSION}
    (await http.post(CHAT, json=body, timeout=60)).raise_for_status()
    await tab.until(f"{TURNS} === {len(seen['costs']) + 1}")
    seen["focus kept"] = (before, await tab.value(FOCUSED))


async def read_values(tab: Page, seen: Seen, http: httpx.AsyncClient) -> None:
    """Take what the page says, and what the API says of the same."""
    await tab.value(
        "document.querySelectorAll('#requests, #entries').forEach((e) => (e.open = true))"
    )
    scripts = {"cards": CARDS, "table": ROWS, "bars": BARS, "titles": TITLES}
    scripts |= {"text": "document.body.innerText"}
    cache = (await http.get("/v1/cache")).json()["workers"][0]
    told = [cache[name] for name in ("budget_bytes", "bytes", "slots_bytes")]
    shown = f"new Map({CHARTS}).get('{MEMORY}')"
    await tab.until(f"{shown} === '{json.dumps(told, separators=(',', ':'))}'")
    seen |= {name: await tab.value(script) for name, script in scripts.items()}
    seen["charts"] = dict(await tab.value(CHARTS))
    seen["metrics"] = (await http.get("/metrics")).raise_for_status().text
    for row in (await http.get("/v1/sessions")).json()["sessions"]:
        told = await http.get(f"/v1/sessions/{row['session']}")
        seen["lines"] += [line for line in told.json()["lines"] if line not in seen["lines"]]


async def watched(server: Server, devtools: str) -> Seen:
    seen: Seen = {"lines": [], "looks": [], "focus": [], "roved": []}
    http = httpx.AsyncClient(base_url=server.url, headers={"authorization": f"Bearer {KEY}"})
    async with page(devtools) as tab, http:
        seen["sign in"] = await sign_in(tab, server.url)
        has_seen = asyncio.Event()
        talking = asyncio.create_task(talk(server.url, has_seen))
        await tab.until(f"{COUNT} >= 2")
        seen["live"] = await tab.value(COUNT)
        has_seen.set()
        seen["costs"] = await talking
        await tab.until(f"{COUNT} === {len(seen['costs'])} && {TURNS} === {COUNT}")
        await read_values(tab, seen, http)
        await tab.value(CHECKS)
        for look in LOOKS.values():
            await tab.look(*look)
            await tab.until(f"innerWidth === {look[0]}")
            await tab.value(DRAWN)
            seen["looks"].append(await tab.value(CHECKED))
        seen["names"] = await tab.names()
        await go_by_keyboard(tab, seen)
        await go_on(tab, seen, http)
        seen["errors"] = list(tab.errors)
        await asyncio.to_thread(server.stop)
        seen["after stop"] = await tab.until("document.querySelector('#status.bad')?.textContent")
    return seen


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    settings = {"PROXY_API_KEY": KEY, "PROXY_MODEL_ID": "local"}
    made = Server(MODEL_PATH=str(fixture_dir("qwen3")), **settings)
    with made as server, chromium() as devtools:
        yield asyncio.run(watched(server, devtools))


def total(metrics: str, name: str) -> float:
    """Return a metric's sum over its labels."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)
    assert found, f"/metrics has no {name}"
    return sum(map(float, found))


def test_a_key_is_asked_for_in_a_form_that_tells_a_wrong_one(seen: Seen) -> None:
    told = seen["sign in"]
    assert {("textbox", "API key"), ("button", "Show the dashboard")} <= set(told["names"])
    assert (told["focus"], told["refusal"]) == ("key", "This key is not accepted.")
    assert (told["cookie"], told["short"], told["errors"]) == ("", [], []), "no script reads it"


def test_the_page_shows_requests_while_others_are_to_come_and_says_when_its_server_is_gone(
    seen: Seen,
) -> None:
    assert 2 <= seen["live"] < len(seen["costs"])
    assert "connection is lost" in seen["after stop"]
    assert seen["errors"] == []


def test_the_cards_say_what_clients_were_told_and_what_metrics_tell(seen: Seen) -> None:
    names = ("cached", "prefilled", "prompt")
    told = {name: total(seen["metrics"], f"hearth_{name}_tokens_total") for name in names}
    for name in ("cached", "prefilled"):
        assert sum(row[name] for row in seen["costs"]) == told[name] > 0
    cards, ended = seen["cards"], total(seen["metrics"], "hearth_requests_total")
    assert cards["hit"] == pytest.approx(told["cached"] / told["prompt"])
    assert cards["saved"] == told["cached"]
    assert cards["count"] == len(seen["costs"]) == ended
    assert cards["seconds"] > 0 and f"{told['prefilled']:,.0f} were read" in seen["text"]


def test_charts_and_table_show_each_request_as_its_client_was_told(seen: Seen) -> None:
    told = sorted((row["cached"], row["prefilled"]) for row in seen["costs"])
    shown = [tuple(int(cell.replace(",", "")) for cell in row[3:5]) for row in seen["table"]]
    assert sorted(shown) == told
    assert [int(row[0]) for row in seen["table"]] == list(range(len(told), 0, -1))
    whole, *by_source = json.loads(seen["charts"]["Cached and prefilled tokens"])
    cached, prefilled = shown[0]
    assert (whole, sum(value or 0 for value in by_source)) == (cached + prefilled, cached)


def test_every_turn_of_every_session_is_a_bar_with_words_and_a_loss_is_told(seen: Seen) -> None:
    turns = [turn for line in seen["lines"] for turn in line["requests"]]
    assert len(turns) == len(seen["costs"]) == len(seen["bars"])
    for turn in turns:
        words = f"Turn {turn['turn']}: {turn['prompt']:,} tokens. {turn['cached']:,} cached"
        assert any(name.startswith(words) for name in seen["bars"]), words
    assert any(each.startswith("One. The fox jumps.") for each in seen["titles"])
    assert SESSION in seen["text"], "a session's id is text"
    (loss,) = [turn["divergence"] for turn in turns if turn["divergence"]]
    words = f"{loss['lost']:,} tokens to: message edited (message {loss['message'] + 1})"
    assert words in seen["text"] and words in seen["tip"] and loss["remedy"] in seen["tip"]
    assert sum("Lost " in name for name in seen["bars"]) == 1 and seen["tip is gone"]


def test_all_has_a_name_stands_out_and_fits_the_window(seen: Seen) -> None:
    for told in seen["looks"]:
        assert told["text"]["count"] > 40 and told["bars"]["count"] > len(seen["bars"])
        assert (told["text"]["short"], told["bars"]["short"], told["overflow"]) == ([], [], 0)
    roles = {role for role, _ in seen["names"]}
    assert {"main", "banner", "status", "image", "button", "table", "meter"} <= roles
    assert [role for role, name in seen["names"] if role in NAMED and not name.strip()] == []
    images = [name for role, name in seen["names"] if role == "image"]
    assert any(re.match(r"Time to first token: last .+, median ", name) for name in images)


def test_the_tab_key_reaches_all_there_is_and_a_line_is_one_stop(seen: Seen) -> None:
    assert seen["focus"][0].startswith("A Skip to sessions")
    stops = Counter(at.partition(" ")[0] for at in seen["focus"] if "BUTTON" not in at)
    assert stops["SUMMARY"] and stops["DIV"] == 2, "tables scroll by keyboard too"
    turns = [at for at in seen["focus"] if at.startswith("BUTTON Turn ")]
    assert len(turns) == len(seen["lines"])
    first, second, last, before_last = seen["roved"]
    assert first.startswith("BUTTON Turn 1") and second.startswith("BUTTON Turn 2")
    assert before_last != last
    before, after = seen["focus kept"]
    assert after == before and before.startswith("BUTTON Turn 1"), "drawn anew under the reader"
