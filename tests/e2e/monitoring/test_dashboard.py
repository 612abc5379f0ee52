"""The dashboard in a real browser, while a client talks to a real server.

What the page makes of any figure is test_dashboard_page.py's; here its figures are the server's.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.clients.browser import NEEDS_CHROMIUM, Page, chromium, page
from tests.helpers.clients.scraped_metrics import families_of, series_of, total
from tests.helpers.servers.server import WAIT_S_MAX, Server

pytestmark = NEEDS_CHROMIUM
KEY = "the-key"
SESSION = "edited <b>&amp;"  # what a client calls a session is text, whatever it looks like
FOCUS_MAX = 40  # presses of Tab
TEXT = "The fox jumps. " * 30
ONE, EDITED, ANSWER, TWO = (
    {"role": role, "content": text}
    for role, text in (
        *(("user", f"One. {TEXT}"), ("user", f"Edited. {TEXT}")),
        *(("assistant", "Yes."), ("user", "Two.")),
    )
)
FOCUSED = """(() => {
  const at = document.activeElement;
  return at === document.body ? "" : at.tagName + " " + (at.getAttribute("aria-label") ??
    at.textContent).trim().slice(0, 60);
})()"""
LOST = "[...document.querySelectorAll('.turns button')].find((b) => b.ariaLabel.includes('Lost'))"
FIRST = "document.querySelector('.turns:has(button + *, li + li) button')"
COUNT = "Number(document.getElementById('count').dataset.value)"
TURNS = "document.querySelectorAll('.turns button').length"
TIP = "document.getElementById('tip')"
MEMORY = """[...document.querySelectorAll('figure')].find((f) =>
  f.textContent.includes('Memory of kept KV and live slots')).dataset.last"""
SHOWN = {
    "cards": """Object.fromEntries(['hit', 'saved', 'seconds', 'count'].map(
      (name) => [name, Number(document.getElementById(name).dataset.value)]))""",
    "table": """[...document.querySelectorAll('#request-rows tr')].map(
      (r) => [...r.cells].map((c) => c.textContent))""",
    "bars": "[...document.querySelectorAll('.turns button')].map((b) => b.ariaLabel)",
    "title": "document.querySelector('.tree h3').textContent",
    "text": "document.body.innerText",
    "tokens": """JSON.parse([...document.querySelectorAll('figure')].find((f) =>
      f.textContent.includes('Cached and prefilled tokens')).dataset.last)""",
}
Seen = dict[str, Any]  # what one visit showed, by what was looked at


async def sign_in(tab: Page, url: str) -> Seen:
    """Come in as a person does, with the keyboard; the first try is wrong."""
    await tab.open(f"{url}/dashboard")
    told = {"focus": await tab.value("document.activeElement.id"), "names": await tab.names()}
    await tab.write("wrong")
    await tab.press("Enter", "\r")
    told["refusal"] = await tab.until("document.getElementById('wrong')?.textContent")
    tab.errors.clear()  # the 401 that was asked for
    await tab.value("document.getElementById('key').focus()")
    await tab.write(KEY)
    await tab.press("Enter", "\r")
    await tab.until("document.getElementById('status')?.textContent.startsWith('Live')")
    return told | {"cookie": await tab.value("document.cookie")}


async def talk(tab: Page, http: httpx.AsyncClient, *messages: dict[str, str]) -> Seen:
    """Ask, and wait until the page shows it; return what it cost, as its client was told."""
    before = await tab.value(COUNT)
    body = {"model": "local", "messages": messages, "max_tokens": 4, "session_id": SESSION}
    told = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
    await tab.until(f"{COUNT} === {before + 1} && {TURNS} === {before + 1}")
    return dict(told["usage"]["kv_cache"])


async def read_values(tab: Page, http: httpx.AsyncClient) -> Seen:
    """Take what the page says, and what the API says of the same."""
    opened = "document.querySelectorAll('#requests, #entries').forEach((e) => (e.open = true))"
    await tab.value(opened)
    cache = (await http.get("/v1/cache")).json()["workers"][0]
    told = [cache[name] for name in ("budget_bytes", "bytes", "slots_bytes")]
    await tab.until(f"{MEMORY} === '{json.dumps(told, separators=(',', ':'))}'")
    seen = {name: await tab.value(script) for name, script in SHOWN.items()}
    seen["metrics"] = series_of(families_of((await http.get("/metrics")).text).values())
    (row,) = (await http.get("/v1/sessions")).json()["sessions"]
    seen["lines"] = (await http.get(f"/v1/sessions/{row['session']}")).json()["lines"]
    return seen


async def go_by_keyboard(tab: Page, seen: Seen) -> None:
    """Press Tab from the top of the page, then go along the turns of a line."""
    seen["focus"], seen["roved"] = [], []
    await tab.value("document.activeElement.blur()")
    for _ in range(FOCUS_MAX):
        await tab.press("Tab")
        seen["focus"].append(await tab.value(FOCUSED))
        if not seen["focus"][-1]:
            break
    await tab.value(f"{FIRST}.focus()")
    for key in ("Home", "ArrowRight", "End", "ArrowLeft"):
        await tab.press(key)
        seen["roved"].append(await tab.value(FOCUSED))
    await tab.value(f"{LOST}.focus()")
    seen["tip"] = await tab.value(f"{TIP}.textContent")
    await tab.press("Escape")
    seen["tip is gone"] = await tab.value(f"{TIP}.hidden")


async def watched(server: Server, devtools: str) -> Seen:
    headers = {"authorization": f"Bearer {KEY}"}
    http = httpx.AsyncClient(base_url=server.url, headers=headers, timeout=WAIT_S_MAX)
    async with page(devtools) as tab, http:
        signed_in = await sign_in(tab, server.url)
        turns = ([ONE], [ONE, ANSWER, TWO], [EDITED, ANSWER, TWO])
        costs = [await talk(tab, http, *messages) for messages in turns]
        seen = {"sign in": signed_in, "costs": costs} | await read_values(tab, http)
        await go_by_keyboard(tab, seen)
        await tab.value(f"{LOST}.focus()")
        before = await tab.value(FOCUSED)
        await talk(tab, http, {"role": "user", "content": "More."})  # its session is drawn anew
        seen["focus kept"] = (before, await tab.value(FOCUSED))
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


def test_a_key_is_asked_for_in_a_form_that_tells_a_wrong_one(seen: Seen) -> None:
    told = seen["sign in"]
    assert {("textbox", "API key"), ("button", "Show the dashboard")} <= set(told["names"])
    assert (told["focus"], told["refusal"]) == ("key", "This key is not accepted.")
    assert told["cookie"] == "", "no script reads it"


def test_the_cards_say_what_clients_were_told_and_what_metrics_tell(seen: Seen) -> None:
    cards, metrics = seen["cards"], seen["metrics"]
    names = ("cached", "prefilled", "prompt")
    told = {name: total(metrics, f"hearth_{name}_tokens_total") for name in names}
    for name, field in (("cached", "prefix_length"), ("prefilled", "prefilled")):
        assert sum(row[field] for row in seen["costs"]) == told[name] > 0
    assert cards["hit"] == pytest.approx(told["cached"] / told["prompt"])
    assert (cards["saved"], cards["count"]) == (told["cached"], len(seen["costs"]))
    assert total(metrics, "hearth_requests_total") == len(seen["costs"])
    assert cards["seconds"] > 0 and f"{told['prefilled']:,.0f} were read" in seen["text"]


def test_charts_and_table_show_each_request_as_its_client_was_told(seen: Seen) -> None:
    told = [(row["prefix_length"], row["prefilled"]) for row in reversed(seen["costs"])]
    shown = [tuple(int(cell.replace(",", "")) for cell in row[3:5]) for row in seen["table"]]
    assert shown == told
    whole, *by_source = seen["tokens"]
    assert (whole, sum(value or 0 for value in by_source)) == (sum(told[0]), told[0][0])


def test_every_turn_of_a_session_is_a_bar_with_words_and_a_loss_is_told(seen: Seen) -> None:
    turns = [turn for line in seen["lines"] for turn in line["requests"]]
    assert len(turns) == len(seen["costs"]) == len(seen["bars"])
    for turn in turns:
        words = f"Turn {turn['turn']}: {turn['prompt']:,} tokens. {turn['cached']:,} cached"
        assert any(name.startswith(words) for name in seen["bars"]), words
    assert seen["title"].startswith("One. The fox jumps.")
    assert SESSION in seen["text"], "a session's id is text"
    (loss,) = [turn["divergence"] for turn in turns if turn["divergence"]]
    words = f"{loss['lost']:,} tokens to: message edited (message {loss['message'] + 1})"
    assert words in seen["text"] and words in seen["tip"] and loss["remedy"] in seen["tip"]
    assert sum("Lost " in name for name in seen["bars"]) == 1 and seen["tip is gone"]


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


def test_a_page_whose_server_is_gone_says_so_and_its_console_stays_clean(seen: Seen) -> None:
    assert "connection is lost" in seen["after stop"]
    assert seen["errors"] == []
