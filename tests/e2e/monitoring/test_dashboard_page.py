"""The dashboard's page in Chromium before a server that tells it what is hard to make happen."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.helpers.cases import cases
from tests.helpers.clients.axe import serious_findings
from tests.helpers.clients.browser import NEEDS_CHROMIUM, chromium, page

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
ENTRY: Row = {
    **{"worker": 0, "line": 7, "session": "both", "agent": "", "model": "m", "tokens": 1_234},
    **{"context_share": 0.125, "bytes": 3 * 2**20, "slot_bytes": 2**20, "images": 2, "turns": 2},
    **{"age_s": 75.0, "idle_s": 30.0, "depth": 0, "hits": 1, "pinned": False},
}
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
    "entries": [ENTRY],
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


SHOWN = {
    "closed": "document.querySelectorAll('.tree:not([open])').length",
    "now": """[document.getElementById('now'), ...document.querySelectorAll('#now-rows li')]
      .map((each) => each.textContent)""",
    "progress": "[...document.querySelectorAll('progress')].map((p) => [p.value, p.max])",
    "lines": """[...document.querySelectorAll('.tree')].map((t) =>
      [t.querySelector('h3').textContent,
       [...t.querySelectorAll('.line-head:not(.ids)')].map((p) => p.textContent)])""",
    "about": "document.querySelector('.tree .about').textContent",
    "cards": """Object.fromEntries([...document.querySelectorAll('.cards > div')].map((each) =>
      [each.firstChild.textContent, [...each.querySelectorAll('dd:not([hidden])')]
       .map((dd) => dd.textContent.trim()).filter(Boolean).join(' | ')]))""",
    "rest": "document.getElementById('trees-note').textContent",
    "requests": """[...document.querySelectorAll('#request-rows tr')].map(
      (r) => [...r.cells].map((c) => c.textContent))""",
    "entries": """[...document.querySelectorAll('#entry-rows tr')].map(
      (r) => [...r.cells].map((c) => c.textContent))""",
    "matches": """Object.fromEntries([...document.querySelectorAll('#matches [data-match]')].map(
      (each) => [each.dataset.match, Number(each.dataset.value)]))""",
    "beyond": """(() => { const box = document.querySelector('#requests .scroll');
      return box.scrollWidth - box.clientWidth; })()""",  # pixels that only scrolling shows
    "warnings": "[...document.querySelectorAll('.warning')].map((each) => each.textContent)",
    "terms": """Object.fromEntries([
      ...document.querySelector('.workers').firstChild.querySelectorAll('dt')]
      .map((each) => [each.textContent, each.nextElementSibling.textContent]))""",
    "evicted": "[...document.querySelectorAll('#eviction-rows li')].map((e) => e.textContent)",
    "charts": "[...document.querySelectorAll('figure:not([hidden]) b')].map((e) => e.textContent)",
    "forwards": """['forwards', 'drafts-note'].map(
      (id) => document.getElementById(id).textContent)""",
    "hurt": "window.hurt ?? null",
}
OPEN = """document.querySelectorAll('.tree, #requests').forEach((each) => (each.open = true))"""
DRAWN = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
AGAIN = "document.querySelector('#status.bad a')"
LOOKS = ((1180, "light"), (768, "dark"), (590, "light"), (360, "dark"))


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


async def watched(devtools: str) -> Row:
    seen: Row = {"looks": [], "findings": []}
    told = Told(SNAPSHOT)
    async with TestServer(told.app()) as server, page(devtools) as tab:
        await tab.look(1180, 900, "light")
        await tab.open(str(server.make_url("/dashboard")))
        await tab.until("document.getElementById('status').textContent.startsWith('Live')")
        await tab.until("document.querySelectorAll('.u-legend').length >= 3")
        seen["first"] = await tab.value(SHOWN["closed"])
        await tab.value(OPEN)
        await tab.until("document.querySelectorAll('.line-head').length > 8")
        await tab.value(CHECKS)
        seen |= {name: await tab.value(script) for name, script in SHOWN.items()}
        for width, scheme in LOOKS:
            await tab.look(width, 900, scheme)
            await tab.until(f"innerWidth === {width}")
            await tab.value(DRAWN)
            seen["looks"].append(await tab.value(CHECKED))
            if width in (1180, 360):
                seen["findings"].append(await serious_findings(tab))
        told.changed.set()
        await tab.until("document.querySelectorAll('.tree').length === 2")
        seen["changed"] = await tab.value(SHOWN["lines"])
        seen["errors"] = list(tab.errors)
        told.ended.set()
        await tab.until(f"{AGAIN} !== null")
        seen["after end"] = await tab.value(f"[{AGAIN}.textContent, {AGAIN}.pathname]")
    return seen


@pytest.fixture(scope="module")
def devtools() -> Iterator[str]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def seen(devtools: str) -> Row:
    return asyncio.run(watched(devtools))


@pytest.mark.parametrize("case", cases("monitoring/page_shows.yaml"))
def test_the_page_shows_what_it_is_told(seen: Row, case: Row) -> None:
    for part, wanted in case.items():
        shown = seen[part]
        some = {name: shown[name] for name in wanted} if isinstance(wanted, dict) else shown
        assert some == wanted, part


def test_a_session_is_told_by_its_first_words_and_opens_for_its_turns(seen: Row) -> None:
    assert seen["first"] == len(SESSIONS), "of many sessions none is open by itself"
    lines = dict(seen["lines"])
    assert re.fullmatch(r"Pi 1\.2 · ▲ 70 lost · [\d,]+ d ago · 2 turns · 46 tok/s", seen["about"])
    assert list(lines)[:2] == ["Mend it", "both"], "and by its id where it has no title"
    assert lines["Mend it"] == ["Line 1 · main · 2 turns · 100 tokens"], "two workers know a turn"
    new = ["new", ["Line 4 · main · 1 turn · 100 tokens"]]
    assert seen["changed"] == [new, ["Mend it", lines["Mend it"]]], "what did not change is kept"


def test_names_are_text_and_leave_the_other_columns_their_place(seen: Row) -> None:
    assert (seen["hurt"], seen["beyond"]) == (None, 0)
    assert [row[1] for row in reversed(seen["requests"])] == ["Mend it", *NAMES[1:]] * 50
    assert set(NAMES[1:]) < set(dict(seen["lines"]))


def test_what_is_nearly_full_says_which_setting_gives_it_room_and_what_made_way(seen: Row) -> None:
    cache, memory, system, dead = seen["warnings"]
    assert cache.startswith("95.0 % of the budget") and "CACHE_RAM_BUDGET_MB" in cache
    assert "MEMORY_LIMIT_MB" in memory
    assert "short of memory (critical)" in system and "new prompts wait" in system
    assert dead == "It was killed."
    (row,) = seen["evicted"]
    assert row.endswith("entry 7 of worker 0 gave up 3.0 KB: 1 piece, 2 snapshots, 512 tokens")


def test_it_is_readable_and_fits_whatever_is_told(seen: Row) -> None:
    for look in seen["looks"]:
        assert look["text"]["count"] > 100
        assert (look["text"]["short"], look["overflow"]) == ([], 0)
    assert seen["errors"] == []
    if None in seen["findings"]:
        pytest.skip("axe-core is not installed, and npm does not reach its registry")
    assert seen["findings"] == [[], []]


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
COLUMN = """[document.querySelector('.answerer'), ...document.querySelectorAll(
  '#request-rows td:nth-child(14)')].map((each) => getComputedStyle(each).display)"""
CLOUD = "document.getElementById('cloud').hidden || document.getElementById('cloud').textContent"
FIRST_TOKEN = "document.querySelector('figure[data-last] figcaption span').textContent"
HEIGHT = "document.getElementById('trees').offsetHeight"
FORTY = [{"session": f"session {n}", "lines": [line(0, 1, number=n)]} for n in range(40)]


async def answered(devtools: str, rows: list[Row], spent: Row) -> Row:
    """Return what the page makes of requests that others answered in part, of forty sessions."""
    requests = [request(number, "s", 80) | row for number, row in enumerate(rows, start=1)]
    told = Told(SNAPSHOT | {"requests": requests, "sessions": FORTY})
    told.snapshot["totals"] = SNAPSHOT["totals"] | {"cloud": spent}
    scripts = {"cells": SHOWN["requests"], "column": COLUMN, "cloud": CLOUD, "height": HEIGHT}
    scripts |= {"first token": FIRST_TOKEN, "hurt": SHOWN["hurt"]}
    async with TestServer(told.app()) as server, page(devtools) as tab:
        await tab.look(1280, 900, "light")
        await tab.open(str(server.make_url("/dashboard")))
        await tab.until("document.querySelectorAll('#request-rows tr').length > 1")
        await tab.value(OPEN.replace(".tree, ", ""))
        seen = {name: await tab.value(script) for name, script in scripts.items()}
        assert (seen["hurt"], tab.errors) == (None, [])
        told.changed.set()
        told.ended.set()
    return seen


def test_each_row_says_who_answered_and_what_others_read_and_wrote_stands_apart(
    devtools: str,
) -> None:
    """Where one model answers all the page does not name it. The charts are of local answers."""
    local = asyncio.run(answered(devtools, [LOCAL] * 2, dict.fromkeys(SPENT, 0)))
    assert (local["cloud"], set(local["column"])) == (True, {"none"})
    mixed = asyncio.run(answered(devtools, MIXED, SPENT))
    assert "none" not in mixed["column"]
    assert [row[13] for row in reversed(mixed["cells"])] == ["hearth/big", *AFTER, NASTY]
    assert mixed["cloud"] == "2 answered elsewhere: 41,300 tokens read, 512 written, $0.0625"
    assert mixed["cells"][2][2:7] == ["100", "40", "–", "", ""]  # no prefill, source or match
    assert mixed["first token"] == local["first token"]
    assert 0 < mixed["height"] <= 900, "forty conversations take one screen"
