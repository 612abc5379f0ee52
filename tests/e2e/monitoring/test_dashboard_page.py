"""The dashboard's page in Chromium before a server that tells it what is hard to make happen."""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.helpers.clients.axe import serious_findings
from tests.helpers.clients.browser import NEEDS_CHROMIUM, Page, chromium, page

pytestmark = NEEDS_CHROMIUM
Row = dict[str, Any]
PAGES = Path(__file__).parents[3] / "proxy" / "monitoring" / "pages"
CHECKS = (Path(__file__).parents[2] / "helpers" / "clients" / "page_checks.js").read_text()
CHECKED = "({text: checks.text(), overflow: checks.overflow()})"
LONG = "a-session-with-a-name-" * 9
NAMES = [
    LONG,
    "\u202eright to left \u05e9\u05dc\u05d5\u05dd",
    "<img src=x onerror='window.hurt = 1'>",
    "</script><script>window.hurt = 1</script>",
]
WORKER: Row = {
    "id": 0,
    "state": "ready",
    "model": "m",
    "running": 1,
    "waiting": 1,
    "restarts": 0,
    "active_bytes": 900,
    "problem": None,
    "cache": {
        **{"bytes": 95, "budget_bytes": 100, "memory_limit_bytes": 1000, "busy_slots": 1},
        **{"slots_max": 2, "slots_bytes": 5, "extents": 3, "snapshots": 4, "exact": True},
        "evicted": {
            **{"count": {"extent": 1, "snapshot": 2}, "bytes": {"extent": 2048, "snapshot": 1024}},
            "last": [
                {"line": 7, "at": 0, "parts": {"extent": 1, "snapshot": 2}}
                | {"bytes": 3072, "tokens": 512}
            ],
        },
        "quantisation": {
            "live": {"bits": 8, "group_size": 64, "scheme": "uniform", "from_tokens": 5_000},
            **{"stored": None, "ignored": {"CACHE_STORE_BITS": "it reuses exact KV only"}},
        },
        "pressure": {"level": "critical", "severity": 2},
        "speculation": {
            **{"mode": "auto", "state": "on", "reason": "", "forwards": 62, "rows": 130},
            **{"tokens": 100, "speedup_estimate": 1.404},
            "by_source": {
                "forced": {"drafted": 40, "accepted": 39},
                "history": {"drafted": 1_200, "accepted": 80},
                "model": {"drafted": 0, "accepted": 0},
            },
        },
        "trunks": {"count": 1, "rows": 4, "spared_bytes": 3 * 2**20},
        "disk": {"bytes_written_today": 6 * 2**30, "write_bytes_per_day": 10 * 2**30}
        | {"write_bytes_left": 4 * 2**30},
    },
}
ANSWERS: list[Row] = [
    {"request_id": f"answer{number}0123456789", "worker": 0, "completion_tokens": 1_024 + number}
    | {"tokens_per_s": speed, "age_s": 42.25, "title": f"Ask {number}", "client": "Pi 1.2"}
    for number, speed in enumerate((7.5, 30.0, None))
]
PREFILL: Row = {
    **{"request_id": "f7ab611a805640fb", "worker": 0, "prompt_tokens": 41_200},
    **{"cached_tokens": 1_024, "done_tokens": 10_300, "age_s": 42.25},
    **{"title": "", "client": "", "session": ""},
}
LOADING = {"step": "weights", "s": 12.0, "held_bytes": 4 * 2**30, "of_bytes": 20 * 2**30}
WAITING: Row = {"request_id": "0123456789abcdef", "worker": 0, "position": 1, "age_s": 3.5}
STATE: Row = {
    "workers": [
        WORKER,
        {
            "id": 1,
            "state": "loading",
            "problem": "It was killed.",
            "cache": None,
            "loading": LOADING,
        },
    ],
    "prefills": [PREFILL],
    "queue": [WAITING] * 20,
    "answers": ANSWERS,
    "entries": [],
    "held": 345,
    "sessions": {"Pi 1.2": 40, "": 2},
}


def request(number: int, session: str, ttft_ms: int) -> Row:
    return {
        **{"number": number, "session": session, "prompt": 100, "cached": 40, "prefilled": 60},
        **{"source": "slot", "ttft_ms": ttft_ms, "speed": 1000, "ended": "stop"},
        **{"match": "supersequence", "decode_speed": 45.5, "images": 0, "image_ms": None},
        "divergence": None,
    }


def line(worker: int, turns: int, number: int = 1) -> Row:
    """Return a line of the session; the workers know the same turns."""
    told = [
        {
            **{"request_id": f"r{number}-{turn}", "turn": turn, "prompt": 100, "cached": 40},
            **{"prefilled": 60, "source": "slot", "ttft_ms": 80, "divergence": None},
        }
        for turn in range(1, turns + 1)
    ]
    return {
        **{"line": number, "parent": None, "kind": "main", "agent": "", "branch_message": 0},
        **{"turns": turns, "tokens": 100, "worker": worker, "requests": told},
    }


SESSIONS = [
    {"session": LONG, "title": "Mend it", "client": "Pi 1.2", "model": "m", "lost": 70}
    | {"begun_at": 1.5e9, "used_at": 1.5e9, "decode_speed": 45.5, "turns": 2}
    | {"lines": [line(0, 1), line(1, 2)]},  # worker 0 knows the first turn only
    {"session": "both", "lines": [line(0, 1, number=2), line(1, 1, number=3)]},
    {"session": "new", "lines": []},
    *({"session": name, "lines": [line(0, 1, number=9)]} for name in NAMES[1:]),
]
SNAPSHOT = {
    "requests": [
        request(number, name, 75_000) for number, name in enumerate(NAMES * 75, start=1)
    ],  # 300, more than a page keeps
    "totals": {
        **{"requests": 300, "cached_tokens": 12_000, "prefilled_tokens": 18_000, "hit_rate": 0.4},
        **{"completion_tokens": 7, "speed": 1000, "saved_s": 12, "decode_speed": 45.5},
        **{"prompt_tokens": 30_000, "lost_tokens": 70, "lost_by_cause": {"system prompt": 70}},
        **{"match_share": 0.4, "match_tokens": 40, "disconnects": 1},
        **{"accepted_prediction_tokens": 119, "rejected_prediction_tokens": 1_121},
        **{"decode_forwards": 62, "forwards_per_token": 0.62},
        "matches": {"exact": 0, "prefix": 0, "supersequence": 300, "lcp": 0, "miss": 0, "none": 0},
    },
    "state": STATE,
    "sessions": SESSIONS,
}


CHANGED = {
    "order": ["new", LONG],
    "sessions": [{"session": "new", "lines": [line(0, 1, number=4)]}],
}


@dataclass
class Seen:
    closed: int = -1  # sessions that are open by themselves
    cards: dict[str, str] = field(default_factory=dict)
    abouts: list[str] = field(default_factory=list)
    now: list[str] = field(default_factory=list)
    progress: list[Any] = field(default_factory=list)
    lines: dict[str, list[str]] = field(default_factory=dict)
    rest: str = ""
    cells: list[list[str]] = field(default_factory=list)
    beyond: int = -1  # pixels of the table that only scrolling shows, on a desktop
    warnings: list[str] = field(default_factory=list)
    terms: dict[str, str] = field(default_factory=dict)  # of the first worker
    evicted: list[str] = field(default_factory=list)
    charts: list[str] = field(default_factory=list)
    forwards: list[str] = field(default_factory=list)  # a token, and what is said of drafts
    hurt: Any = None
    looks: list[Any] = field(default_factory=list)
    findings: list[list[str] | None] = field(default_factory=list)  # axe-core's, of two looks
    changed: dict[str, list[str]] = field(default_factory=dict)
    after_end: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class Told:
    """A server of the page: a snapshot, what `changed` of sessions, until it `ended` for good."""

    def __init__(self, snapshot: Row) -> None:
        self.snapshot = snapshot
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()

    async def events(self, asked: web.Request) -> web.StreamResponse:
        if self.ended.is_set():
            return web.json_response({}, status=401)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(asked)
        data = json.dumps(self.snapshot)
        await response.write(f"retry: 50\nevent: snapshot\ndata: {data}\n\n".encode())
        await self.changed.wait()
        data = json.dumps(CHANGED)
        await response.write(f"event: sessions\ndata: {data}\n\n".encode())
        await self.ended.wait()
        return response

    def app(self) -> web.Application:
        async def index(_: web.Request) -> web.FileResponse:
            return web.FileResponse(PAGES / "index.html")

        app = web.Application()
        app.router.add_get("/dashboard", index)
        app.router.add_get("/dashboard/events", self.events)
        app.router.add_static("/dashboard", PAGES)
        return app


async def lines_shown(tab: Page) -> dict[str, list[str]]:
    return dict(
        await tab.value(
            "[...document.querySelectorAll('.tree')].map((t) => [t.querySelector('h3').textContent,"
            " [...t.querySelectorAll('.line-head:not(.ids)')].map((p) => p.textContent)])"
        )
    )


async def read(tab: Page, seen: Seen) -> None:
    """Take what the page makes of the snapshot."""
    seen.now = await tab.value(
        "[document.getElementById('now'), ...document.querySelectorAll('#now-rows li')]"
        ".map((each) => each.textContent)"
    )
    seen.progress = await tab.value(
        "[...document.querySelectorAll('progress')].map((p) => [p.value, p.max])"
    )
    seen.lines = await lines_shown(tab)
    seen.abouts = await tab.value(
        "[...document.querySelectorAll('.tree .about')].map((each) => each.textContent)"
    )
    seen.cards = await tab.value(
        "Object.fromEntries([...document.querySelectorAll('.cards > div')].map((each) =>"
        " [each.firstChild.textContent, [...each.querySelectorAll('dd:not([hidden])')]"
        ".map((dd) => dd.textContent.trim()).filter(Boolean).join(' | ')]))"
    )
    seen.rest = await tab.value("document.getElementById('trees-note').textContent")
    await tab.value("document.getElementById('requests').open = true")
    seen.cells = await tab.value(
        "[...document.querySelectorAll('#request-rows tr')].map("
        "(r) => [...r.cells].map((c) => c.textContent))"
    )
    seen.beyond = await tab.value(
        "(() => { const box = document.querySelector('#requests .scroll');"
        " return box.scrollWidth - box.clientWidth; })()"
    )
    seen.warnings = await tab.value(
        "[...document.querySelectorAll('.warning')].map((each) => each.textContent)"
    )
    seen.terms = await tab.value(
        "Object.fromEntries([...document.querySelector('.workers').firstChild.querySelectorAll('dt')]"
        ".map((each) => [each.textContent, each.nextElementSibling.textContent]))"
    )
    seen.evicted = await tab.value(
        "[...document.querySelectorAll('#eviction-rows li')].map((each) => each.textContent)"
    )
    seen.charts = await tab.value(
        "[...document.querySelectorAll('figure:not([hidden]) b')].map((each) => each.textContent)"
    )
    seen.forwards = await tab.value(
        "['forwards', 'drafts-note'].map((id) => document.getElementById(id).textContent)"
    )
    seen.hurt = await tab.value("window.hurt ?? null")


async def watched(artefacts: Path, devtools: str) -> Seen:
    seen, told = Seen(), Told(SNAPSHOT)
    async with TestServer(told.app()) as server, page(devtools) as tab:
        await tab.look(1180, 900, "light")
        await tab.open(str(server.make_url("/dashboard")))
        await tab.until("document.getElementById('status').textContent.startsWith('Live')")
        await tab.until("document.querySelectorAll('.u-legend').length >= 3")
        seen.closed = await tab.value("document.querySelectorAll('.tree[open]').length")
        await tab.value("document.querySelectorAll('.tree').forEach((each) => (each.open = true))")
        await tab.until("document.querySelectorAll('.line-head').length > 8")
        await tab.value(CHECKS)
        await read(tab, seen)
        for width, scheme in ((1180, "light"), (768, "dark"), (590, "light"), (360, "dark")):
            await tab.look(width, 900, scheme)
            await tab.until(f"innerWidth === {width}")
            await tab.shoot(artefacts / f"page-{width}-{scheme}.png")
            seen.looks.append(await tab.value(CHECKED))
            if width in (1180, 360):
                seen.findings.append(await serious_findings(tab))
        told.changed.set()
        await tab.until("document.querySelectorAll('.tree').length === 2")
        seen.changed = await lines_shown(tab)
        seen.errors = list(tab.errors)
        told.ended.set()
        again = "document.querySelector('#status.bad a')"
        await tab.until(f"{again} !== null")
        seen.after_end = await tab.value(f"[{again}.textContent, {again}.pathname]")
    return seen


@pytest.fixture(scope="module")
def devtools() -> Iterator[str]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = Path(os.environ.get("HEARTH_ARTEFACTS") or tmp_path_factory.mktemp("page"))
    found.mkdir(parents=True, exist_ok=True)
    return found


@pytest.fixture(scope="module")
def seen(artefacts: Path, devtools: str) -> Seen:
    return asyncio.run(watched(artefacts, devtools))


def test_who_waits_sees_what_loads_whose_prompt_is_read_and_who_is_before_them(seen: Seen) -> None:
    summed, load, *answers, prefill, first, more = [*seen.now[:7], seen.now[-1]]
    assert summed == "4 running, 1 waiting for a slot. 3 answers are written."
    assert load == "Worker 1 loads: weights, 4.0 GB of 20.0 GB, 12.0 s"
    asked = " · Pi 1.2 · asked 42 s ago"
    assert answers == [
        f"Ask 0 writes its answer: 1,024 tokens, 7.5 tokens/s{asked}",
        f"Ask 1 writes its answer: 1,025 tokens, 30 tokens/s{asked}",
        f"Ask 2 writes its answer: 1,026 tokens{asked}",
    ]
    assert prefill == (
        "Request f7ab611a8056 reads its prompt: 10,300 of 41,200 tokens, 1,024 cached · "
        "asked 42 s ago"
    )
    assert seen.progress == [[4 * 2**30, 20 * 2**30], [10_300, 41_200]]
    assert first.startswith("Request 0123456789ab waits for a slot, place 1")
    assert len(seen.now) == 1 + 9 and more == "and 17 more"


def test_the_first_screen_says_how_fast_how_much_is_kept_and_what_was_lost(seen: Seen) -> None:
    assert seen.cards == {
        "Decode speed": "38 tok/s | now, of 2 answers; median 46 of an answer",
        "Hit rate": "40.0 % | of 30,000 prompt tokens were cached",
        "Tokens saved": "12,000 | 18,000 were read | 12.0 s at 1,000 tokens/s",
        "Tokens lost": "70 | to: system prompt 70",
        "Memory": "900 B | of 1000 B; kept KV 95 B of 100 B",
        "Requests": "300 | 7 tokens written here | 1 client left early",
    }


def test_a_session_is_told_by_its_first_words_and_its_client_and_opens_for_its_id(
    seen: Seen,
) -> None:
    assert seen.closed == 0, "of many sessions none is open by itself"
    assert next(iter(seen.lines)) == "Mend it", "and not by its id"
    about, *_ = seen.abouts
    assert re.fullmatch(r"Pi 1\.2 · ▲ 70 lost · [\d,]+ d ago · 2 turns · 46 tok/s", about)
    assert list(seen.lines)[1] == "both", "which has no title"


def test_a_turn_that_two_workers_know_is_shown_once(seen: Seen) -> None:
    assert seen.lines["Mend it"] == ["Line 1 · main · 2 turns · 100 tokens"]
    assert seen.lines["both"] == [
        "Line 2 of worker 0 · main · 1 turn · 100 tokens",
        "Line 3 of worker 1 · main · 1 turn · 100 tokens",
    ]
    assert seen.lines["new"] == ["Its first turn has not ended yet."]
    assert seen.rest == (
        "and 36 sessions used before these (hearth why lists them). "
        "All 42: 40 of Pi 1.2, 2 of unnamed clients."
    )


def test_sessions_that_did_not_change_are_kept_and_all_are_put_in_order(seen: Seen) -> None:
    assert list(seen.changed.items()) == [
        ("new", ["Line 4 · main · 1 turn · 100 tokens"]),
        ("Mend it", seen.lines["Mend it"]),
    ]


def test_names_are_text_and_leave_the_other_columns_their_place(seen: Seen) -> None:
    assert seen.hurt is None
    assert [row[1] for row in reversed(seen.cells)] == ["Mend it", *NAMES[1:]] * 50
    assert set(NAMES[1:]) < set(seen.lines)
    assert seen.beyond == 0


def test_a_worker_tells_its_bits_what_exact_mode_ignores_and_what_made_way(seen: Seen) -> None:
    assert seen.terms["Exact mode"] == "on"
    assert seen.terms["Live KV"] == "8 bits (uniform, groups of 64) from 5,000 tokens on"
    assert (
        seen.terms["Kept KV"]
        == "as it was computed; CACHE_STORE_BITS is ignored: it reuses exact KV only"
    )
    assert seen.terms["Made way"] == "3 parts, 3.0 KB"
    assert seen.terms["Written to disk today"] == "6.0 GB of 10.0 GB, 4.0 GB left"
    (row,) = seen.evicted
    words = "entry 7 of worker 0 gave up 3.0 KB: 1 piece, 2 snapshots, 512 tokens"
    assert row.endswith(words)


def test_a_worker_tells_what_it_drafts_from_which_source_and_what_that_gains(seen: Seen) -> None:
    assert seen.forwards == ["0.62", "119 of 1,240 drafted tokens accepted"]
    assert seen.terms["Drafts"] == "on (auto), 0.62 forwards a token, about 1.40 times as fast"
    assert seen.terms["Accepted"] == "forced 39 of 40, history 80 of 1,200"


def test_a_worker_tells_what_answers_that_begin_alike_spare(seen: Seen) -> None:
    assert seen.terms["Shared beginnings"] == "4 answers on 1, 3.0 MB spared"


def test_nothing_of_images_is_shown_where_there_were_none(seen: Seen) -> None:
    assert "Decode speed" in seen.charts
    assert "Time in the image encoder" not in seen.charts


def test_what_is_nearly_full_says_which_setting_gives_it_room(seen: Seen) -> None:
    cache, memory, system, dead = seen.warnings
    assert cache.startswith("95.0 % of the budget") and "CACHE_RAM_BUDGET_MB" in cache
    assert "MEMORY_LIMIT_MB" in memory
    assert "short of memory (critical)" in system and "new prompts wait" in system
    assert dead == "It was killed."


def test_it_is_readable_and_fits_whatever_is_told(seen: Seen) -> None:
    for look in seen.looks:
        assert look["text"]["count"] > 100
        assert look["text"]["short"] == []
        assert look["overflow"] == 0
    assert seen.errors == []


def test_axe_core_finds_nothing_serious_in_light_or_dark(seen: Seen) -> None:
    if None in seen.findings:
        pytest.skip("axe-core is not installed, and npm does not reach its registry")
    assert seen.findings == [[], []]


def test_a_page_whose_stream_has_ended_offers_to_be_loaded_again(seen: Seen) -> None:
    assert seen.after_end == ["Load this page again", "/dashboard"]


# ---------------------------------------------------------------- where others answer too

NASTY = "openai/<img src=x onerror='window.hurt = 1'>"
SPENT: Row = {"requests": 2, "prompt_tokens": 41_300, "cached_tokens": 60}
SPENT |= {"completion_tokens": 512, "cost": 0.0625}
ELSEWHERE: Row = {"cloud": True, "prefilled": 0, "source": "none", "match": "none"}
ELSEWHERE |= {"speed": None, "decode_speed": None, "ended": "answered", "ttft_ms": 9_000}
LOCAL: Row = {"cloud": False, "served_by": "hearth/big", "fallback": ""}
AFTER = "openai/gpt-4o (after hearth/big overloaded)", "hearth/big (after openai/gpt-4o timeout)"
MIXED = [
    LOCAL,
    ELSEWHERE | {"served_by": "openai/gpt-4o", "fallback": "hearth/big overloaded"},
    LOCAL | {"fallback": "openai/gpt-4o timeout"},
    ELSEWHERE | {"served_by": NASTY, "fallback": ""},
]
ANSWERED = """({
  cells: [...document.querySelectorAll('#request-rows tr')].map(
    (r) => [...r.cells].map((c) => c.textContent)),
  columns: [document.querySelector('.answerer'), ...document.querySelectorAll(
    '#request-rows td:nth-child(14)')].map((each) => getComputedStyle(each).display),
  cloud: document.getElementById('cloud').hidden || document.getElementById('cloud').textContent,
  charts: Object.fromEntries([...document.querySelectorAll('figure[data-last]')].map(
    (f) => [f.querySelector('b').textContent, f.querySelector('figcaption span').textContent])),
  hurt: window.hurt ?? null, overflow: checks.overflow()})"""


async def answered(devtools: str, rows: list[Row], spent: Row, shot: Path) -> Row:
    """Return what the page makes of requests that others answered in part."""
    requests = [request(number, "s", 80) | row for number, row in enumerate(rows, start=1)]
    told = Told(SNAPSHOT | {"requests": requests, "sessions": []})
    told.snapshot["totals"] = SNAPSHOT["totals"] | {"cloud": spent}
    async with TestServer(told.app()) as server, page(devtools) as tab:
        await tab.look(1180, 900, "light")
        await tab.open(str(server.make_url("/dashboard")))
        await tab.until("document.querySelectorAll('#request-rows tr').length > 1")
        await tab.value("document.getElementById('requests').open = true")
        await tab.value(CHECKS)
        seen: Row = await tab.value(ANSWERED)
        await tab.shoot(shot)
        assert (seen["hurt"], seen["overflow"], tab.errors) == (None, 0, [])
        told.changed.set()
        told.ended.set()
    return seen


def test_each_row_says_who_answered_and_what_others_read_and_wrote_stands_apart(
    artefacts: Path, devtools: str
) -> None:
    """Where one model answers all the page does not name it. The charts are of local answers."""
    nowhere = dict.fromkeys(SPENT, 0)
    local = asyncio.run(answered(devtools, [LOCAL] * 2, nowhere, artefacts / "local.png"))
    assert (local["cloud"], set(local["columns"])) == (True, {"none"})
    mixed = asyncio.run(answered(devtools, MIXED, SPENT, artefacts / "mixed.png"))
    assert "none" not in mixed["columns"]
    assert [row[13] for row in reversed(mixed["cells"])] == ["hearth/big", *AFTER, NASTY]
    assert mixed["cloud"] == "2 answered elsewhere: 41,300 tokens read, 512 written, $0.0625"
    assert mixed["cells"][2][2:7] == ["100", "40", "–", "", ""]  # no prefill, source or match
    first = "Time to first token"
    assert (
        mixed["charts"][first] == local["charts"][first] and "9.0 s" not in mixed["charts"][first]
    )
