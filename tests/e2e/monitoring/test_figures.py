"""Each figure of the page beside /v1/cache, /metrics and what clients were told, on one server.

Clients are told what each of their requests cost: those numbers, added up here, are the hand
count. Pictures of the page go to HEARTH_ARTEFACTS, or to the test's own directory.
"""

import asyncio
import base64
import io
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.image_files import painted
from tests.helpers.clients.browser import NEEDS_CHROMIUM, Page, chromium, page
from tests.helpers.clients.scraped_metrics import Series, families_of, series_of, total
from tests.helpers.servers.server import WAIT_S_MAX, Server

pytestmark = NEEDS_CHROMIUM
ROW_BYTES = 4 * 2 * 2 * 64 * 4  # layers, K and V, heads, their size, bytes: the fixture's config
CONTEXT_TOKENS = 131_072  # of the same
ENDS = (3_053, 3_055)  # its end tokens
ANSWER = 24  # tokens: enough for a speed
IDS = [*range(10, 330)]
OTHERS = [*range(1_000, 1_060)]
FILLERS = 6  # prompts that share no beginning and fill the cache
SETTINGS = {
    "PROXY_MODEL_ID": "local",
    "LIVE_SLOTS_MAX": "2",
    "CACHE_RAM_BUDGET_MB": "4",
    "CACHE_STORE_BITS": "8",
    "KV_GROUP_SIZE": "32",
    "MAX_KV_SIZE_GB": "0",
    "PREFILL_CHUNK": "64",
    "DEFAULT_TEMPERATURE": "0",
}
CELLS = (
    "[...document.querySelectorAll('#{} tr')].map((r) => [...r.cells].map((c) => c.textContent))"
)
TERMS = """Object.fromEntries([...document.querySelectorAll('.workers dt')].map(
  (each) => [each.textContent, each.nextElementSibling.textContent]))"""
MATCHES = """Object.fromEntries([...document.querySelectorAll('#matches [data-match]')].map(
  (each) => [each.dataset.match, Number(each.dataset.value)]))"""
CHARTS = """Object.fromEntries([...document.querySelectorAll('figure:not([hidden])')].map(
  (each) => [each.querySelector('b').textContent, JSON.parse(each.dataset.last ?? 'null')]))"""
EVICTED = "[...document.querySelectorAll('#eviction-rows li')].map((each) => each.textContent)"
NOW = "document.getElementById('now').textContent"
NOW_ROWS = "[...document.querySelectorAll('#now-rows li')].map((each) => each.textContent)"


def card(name: str) -> str:
    return f"Number(document.getElementById('{name}').dataset.value)"


@dataclass
class Told:
    """What the page, /v1/cache and /metrics told at one time."""

    cards: dict[str, float] = field(default_factory=dict)
    matches: dict[str, int] = field(default_factory=dict)
    charts: dict[str, Any] = field(default_factory=dict)
    terms: dict[str, str] = field(default_factory=dict)  # of the worker
    entries: list[list[str]] = field(default_factory=list)
    requests: list[list[str]] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    now: str = ""
    now_rows: list[str] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    recent: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[Series, float] = field(default_factory=dict)


@dataclass
class Seen:
    """What clients were told, and what was told of them: at rest, amid an answer, after it."""

    usages: list[dict[str, Any]] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)  # of those, the two with an image
    last: dict[str, Any] = field(default_factory=dict)  # of those, the last
    rest: Told = field(default_factory=Told)
    amid: Told = field(default_factory=Told)
    after: Told = field(default_factory=Told)
    log: str = ""
    trace: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Talk:
    """Asks one server, and keeps what each answer says it cost."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self.usages: list[dict[str, Any]] = []

    async def complete(self, ids: list[int]) -> dict[str, Any]:
        return await self._ask("/v1/completions", {"prompt": ids})

    async def chat(self, messages: list[Any], session: str) -> dict[str, Any]:
        """Ask, and add the answer to `messages`."""
        usage = await self._ask(
            "/v1/chat/completions", {"messages": messages, "session_id": session}
        )
        messages.append({"role": "assistant", "content": self.text})
        return usage

    async def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        body = {"model": "local", "max_tokens": ANSWER, "enable_thinking": False} | body
        answer = (await self._http.post(path, json=body)).raise_for_status().json()
        choice, usage = answer["choices"][0], answer["usage"]
        self.text = choice.get("text") or (choice.get("message") or {}).get("content")
        self.usages.append(usage)
        return dict(usage)


def picture() -> dict[str, Any]:
    file = io.BytesIO()
    painted(1, (224, 160)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def talk_of_all_kinds(talk: Talk, seen: Seen) -> None:
    """Ask what matches in each way, what shows an image, and more than the cache has room for."""
    for ids in (IDS, IDS + OTHERS, IDS[:200], [*IDS[:200], *OTHERS], IDS):
        await talk.complete(ids)
    question = [{"type": "text", "text": "What is this? " * 20}, picture()]
    sights: list[Any] = [{"role": "user", "content": question}]
    seen.shown.append(await talk.chat(sights, "screenshots"))
    sights.append({"role": "user", "content": "And what else do you see?"})
    seen.shown.append(await talk.chat(sights, "screenshots"))
    for number in range(FILLERS):
        await talk.complete([*range(400 + number, 800 + number)])
    notes: list[Any] = [{"role": "user", "content": "Read the notes. " * 60}]
    await talk.chat(notes, "read-the-notes")
    notes.append({"role": "user", "content": "Which comes first?"})
    seen.last = await talk.chat(notes, "read-the-notes")
    seen.usages = list(talk.usages)


async def told_by(tab: Page, http: httpx.AsyncClient) -> Told:
    cache = (await http.get("/v1/cache")).json()
    scraped = (await http.get("/metrics")).text
    return Told(
        cards={name: await tab.value(card(name)) for name in ("match", "left", "count")},
        matches=await tab.value(MATCHES),
        charts=await tab.value(CHARTS),
        terms=await tab.value(TERMS),
        entries=await tab.value(CELLS.format("entry-rows")),
        requests=await tab.value(CELLS.format("request-rows")),
        evicted=await tab.value(EVICTED),
        now=await tab.value(NOW),
        now_rows=await tab.value(NOW_ROWS),
        totals=cache["totals"],
        cache=cache["workers"][0],
        recent=(await http.get("/v1/sessions")).json()["recent"],
        metrics=series_of(families_of(scraped).values()),
    )


async def at_rest(tab: Page, http: httpx.AsyncClient) -> Told:
    """Return what is told once two looks are alike: after the work of idle time."""
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            before = (await http.get("/v1/cache")).json()["workers"][0]
            await asyncio.sleep(2.5)  # the page is told each second
            told = await told_by(tab, http)
            kept = ("bytes", "slots_bytes", "evictions", "idle_tokens")
            if [before[name] for name in kept] == [told.cache[name] for name in kept]:
                return told


async def leave_an_answer(tab: Page, http: httpx.AsyncClient, seen: Seen, shots: Path) -> None:
    """Have an answer written, look at it, and leave it."""
    never = dict.fromkeys(map(str, ENDS), -100)
    body = {"model": "local", "prompt": IDS, "max_tokens": 30_000, "stream": True}
    body["logit_bias"] = never
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.aiter_lines()  # held: its end would be the client's
        await anext(lines)
        await tab.until(f"{NOW_ROWS}.join().includes('tokens/s')")
        seen.amid = await told_by(tab, http)
        await tab.shoot(shots / "figures-now.png")
    await tab.until(f"{card('left')} === 1 && !{NOW_ROWS}.length")
    seen.after = await at_rest(tab, http)


async def watched(server: Server, devtools: str, shots: Path) -> Seen:
    seen = Seen()
    async with (
        page(devtools) as tab,
        httpx.AsyncClient(base_url=server.url, timeout=WAIT_S_MAX) as http,
    ):
        await tab.look(1180, 900, "light")
        await tab.open(f"{server.url}/dashboard")
        talk = Talk(http)
        await talk_of_all_kinds(talk, seen)
        await tab.until(f"{card('count')} === {len(seen.usages)}")
        seen.rest = await at_rest(tab, http)
        await tab.value(
            "document.querySelectorAll('details').forEach((each) => (each.open = true))"
        )
        await tab.shoot(shots / "figures-light.png")
        await leave_an_answer(tab, http, seen, shots)
        for name, look in {"dark": (1180, 900, "dark"), "phone": (360, 740, "light")}.items():
            await tab.look(*look)
            await tab.until(f"innerWidth === {look[0]}")
            await tab.value("new Promise((done) => setTimeout(done, 300))")
            await tab.shoot(shots / f"figures-{name}.png")
        seen.errors = list(tab.errors)
    seen.log = server.log.read_text()
    seen.trace = [path.read_text() for path in (server.run_dir / "logs").rglob("*.log")]
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    shots = Path(os.environ.get("HEARTH_ARTEFACTS") or tmp_path_factory.mktemp("figures"))
    shots.mkdir(parents=True, exist_ok=True)
    path = str(fixture_dir("qwen3_vl"))
    with Server(MODEL_PATH=path, **SETTINGS) as server, chromium() as devtools:
        yield asyncio.run(watched(server, devtools, shots))


def size_text(nbytes: float) -> str:
    """Return a size as the page writes it."""
    units = iter(("B", "KB", "MB", "GB"))
    unit = next(units)
    while nbytes >= 1024:
        nbytes, unit = nbytes / 1024, next(units)
    return f"{nbytes:.0f} {unit}" if nbytes >= 100 or unit == "B" else f"{nbytes:.1f} {unit}"


def prompt_of(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens"])


def test_prompts_count_by_how_they_matched_in_all_and_each(seen: Seen) -> None:
    told = [usage["kv_cache"]["match"] for usage in seen.usages]
    # An answer stands behind what the second one goes on from, so that they part there.
    assert told[:5] == ["miss", "lcp", "supersequence", "lcp", "exact"]
    hand = Counter(told)
    assert hand["prefix"] == 2, "the second turns of both conversations"
    rest = seen.rest
    assert {name: number for name, number in rest.totals["matches"].items() if number} == hand
    assert {name: number for name, number in rest.matches.items() if number} == hand
    for name, number in rest.totals["matches"].items():
        assert total(rest.metrics, "hearth_matches_total", match=name) == number
    assert [row["match"] for row in reversed(rest.recent)] == told
    words = {"exact": "Exact", "prefix": "Prefix", "supersequence": "Supersequence"}
    words |= {"lcp": "Common prefix", "miss": "Miss"}
    assert [row[6] for row in reversed(rest.requests)] == [words[name] for name in told]


def test_the_average_match_is_the_mean_over_prompts_of_what_each_was_spared(seen: Seen) -> None:
    cached = [usage["kv_cache"]["prefix_length"] for usage in seen.usages]
    shares = [kept / prompt_of(usage) for kept, usage in zip(cached, seen.usages, strict=True)]
    rest = seen.rest
    assert 0 < mean(shares) < 1
    assert rest.totals["match_share"] == pytest.approx(mean(shares))
    assert rest.totals["match_tokens"] == pytest.approx(mean(cached))
    assert rest.cards["match"] == pytest.approx(mean(shares))
    summed = total(rest.metrics, "hearth_match_ratio_sum")
    assert summed / total(rest.metrics, "hearth_match_ratio_count") == pytest.approx(mean(shares))


def test_the_encoders_time_is_told_with_the_request_it_was_spent_for(seen: Seen) -> None:
    first, second = (usage["kv_cache"]["image_ms"] for usage in seen.shown)
    rest = seen.rest
    assert first > 0 == second, "the second turn's image was kept"
    assert all("image_ms" not in usage["kv_cache"] for usage in seen.usages[:5])
    told = [row["image_ms"] for row in reversed(rest.recent)]
    assert [each for each in told if each is not None] == [first, second]
    assert rest.cache["vision"]["encoder_s"] * 1000 == pytest.approx(first, abs=1)
    assert total(rest.metrics, "hearth_image_encoder_seconds_sum") * 1000 == first
    assert total(rest.metrics, "hearth_image_encoder_seconds_count") == 1
    shown = [row[7] for row in reversed(rest.requests)]
    assert [each for each in shown if each != "–"] == [f"{first} ms", "0 ms"]
    assert "Time in the image encoder" in rest.charts
    assert rest.terms["Images encoded"] == f"1 in {rest.cache['vision']['encoder_s'] * 1000:.0f} ms"


def test_the_speed_of_each_answer_is_told(seen: Seen) -> None:
    rest = seen.rest
    speeds = [row["decode_speed"] for row in rest.recent]
    hand = [
        round((row["completion"] - 1) * 1000 / (row["finish_ms"] - row["ttft_ms"]), 1)
        for row in rest.recent
    ]
    assert speeds == hand and len(hand) == len(seen.usages)
    assert total(rest.metrics, "hearth_decode_tokens_per_second_sum") == pytest.approx(sum(speeds))
    assert rest.charts["Decode speed"] == [speeds[0]]
    assert float(rest.requests[0][10].replace(",", "")) == pytest.approx(speeds[0], abs=0.5)


def test_an_entry_tells_its_true_size_its_images_and_its_share_of_the_context(seen: Seen) -> None:
    rest = seen.rest
    live = [entry for entry in rest.cache["entries"] if entry["slot_bytes"]]
    assert live, "the last conversation is in its slot"
    held = prompt_of(seen.last) + seen.last["completion_tokens"]
    newest = next(entry for entry in live if entry["turns"] == 2 and not entry["images"])
    assert held - 1 <= newest["tokens"] <= held
    assert newest["bytes"] == newest["slot_bytes"] == newest["tokens"] * ROW_BYTES
    entries = rest.cache["entries"]
    kept = sum(entry["bytes"] - entry["slot_bytes"] for entry in entries)
    assert kept == rest.cache["bytes"] == total(rest.metrics, "hearth_cache_bytes")
    for entry, row in zip(entries, rest.entries, strict=True):
        assert entry["context_share"] == entry["tokens"] / CONTEXT_TOKENS
        assert entry["model"] == "local" and entry["age_s"] >= entry["idle_s"]
        live_text = size_text(entry["slot_bytes"]) if entry["slot_bytes"] else "–"
        share = f"{100 * entry['context_share']:.1f} %"
        figures = ["local", f"{entry['tokens']:,}", share, size_text(entry["bytes"]), live_text]
        assert row[2:8] == [*figures, f"{entry['images']}"]


def test_live_slots_are_in_the_chart_of_memory(seen: Seen) -> None:
    rest = seen.rest
    slots = sum(slot["bytes"] for slot in rest.cache["slots"])
    assert slots == rest.cache["slots_bytes"] == total(rest.metrics, "hearth_live_slots_bytes") > 0
    told = [rest.cache["budget_bytes"], rest.cache["bytes"], slots]
    assert rest.charts["Memory of kept KV and live slots"] == told


def test_what_made_way_is_told_with_its_entry_and_adds_up(seen: Seen) -> None:
    rest = seen.rest
    evicted, last = rest.cache["evicted"], rest.cache["evicted"]["last"]
    count, nbytes = sum(evicted["count"].values()), sum(evicted["bytes"].values())
    assert count == rest.cache["evictions"] == total(rest.metrics, "hearth_evictions_total") > 0
    assert nbytes > 0 and sum(sum(row["parts"].values()) for row in last) == count
    assert sum(row["bytes"] for row in last) == nbytes
    assert rest.terms["Made way"] == f"{count:,} parts, {size_text(nbytes)}"
    assert len(rest.evicted) == min(len(last), 12)
    words = f"entry {last[0]['line']} of worker 0 gave up {size_text(last[0]['bytes'])}: "
    assert words in rest.evicted[0]


def test_what_is_computed_in_is_told(seen: Seen) -> None:
    dtype = seen.rest.cache["dtype"]
    reason = "the weights are float32"
    assert dtype == {"name": "float32", "cast": False, "dense": False, "reason": reason}


def test_the_bits_of_kv_are_told(seen: Seen) -> None:
    rest = seen.rest
    stored = {"bits": 8, "group_size": 32, "scheme": "uniform", "from_tokens": 256}
    assert rest.cache["quantisation"] == {"live": None, "stored": stored, "ignored": {}}
    assert rest.terms["Live KV"] == "as it was computed"
    assert rest.terms["Kept KV"] == "8 bits (uniform, groups of 32) from 256 tokens on"


def test_an_answer_that_is_written_is_told_with_its_speed(seen: Seen) -> None:
    amid = seen.amid
    (answer,) = amid.cache["answers"]
    assert answer["completion_tokens"] > 16 and answer["tokens_per_s"] > 0
    assert total(amid.metrics, "hearth_answers_running") == 1
    assert total(amid.metrics, "hearth_answers_tokens_per_second") > 0
    assert "1 running, 0 waiting for a slot. 1 answer is written." in amid.now
    (row,) = amid.now_rows
    words = (
        r".+ writes its answer: ([\d,]+) tokens, [\d.,]+ tokens/s · python httpx [\d.]+ · asked "
    )
    found = re.match(words, row)
    assert found is not None, row
    assert 16 < int(found[1].replace(",", "")) <= answer["completion_tokens"]
    assert seen.after.cache["answers"] == []
    assert total(seen.after.metrics, "hearth_answers_running") == 0


def test_a_client_that_left_counts_once(seen: Seen) -> None:
    for told, left in ((seen.rest, 0), (seen.after, 1)):
        assert told.cards["left"] == told.totals["disconnects"] == left
        assert total(told.metrics, "hearth_client_disconnects_total") == left


def test_the_three_counters_are_in_the_starts_line_each_requests_and_the_trace(seen: Seen) -> None:
    names = ("vlm_retreat", "hybrid_trim_miss", "exact_key_rejected_by_model_lcp")
    nothing = " ".join(f"{name}=0" for name in names)
    finished = [line for line in seen.log.splitlines() if "finished request=" in line]
    assert len(finished) == len(seen.usages) + 1
    assert all(line.endswith(nothing) for line in finished)
    (ready,) = [line for line in seen.log.splitlines() if "ready model=" in line]
    assert ready.endswith(nothing)
    rows = "".join(seen.trace).splitlines()
    assert len(rows) == 4, "of the two conversations"
    assert all(f'"{name}":0' in row for name in names for row in rows)


def test_the_console_stays_clean(seen: Seen) -> None:
    assert seen.errors == []
