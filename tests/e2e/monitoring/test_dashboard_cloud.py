"""The dashboard's page in Chromium where others answer some of the requests."""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.helpers.clients.browser import NEEDS_CHROMIUM, Page, chromium, page

pytestmark = NEEDS_CHROMIUM
Row = dict[str, Any]
PAGES = Path(__file__).parents[3] / "proxy" / "monitoring" / "pages"
CHECKS = (Path(__file__).parents[2] / "helpers" / "clients" / "page_checks.js").read_text()
CELLS = """[...document.querySelectorAll('#request-rows tr')].map(
  (r) => [...r.cells].map((c) => c.textContent))"""
ANSWERERS = """[document.querySelector('.answerer'), ...document.querySelectorAll(
  '#request-rows td:nth-child(14)')].map((each) => getComputedStyle(each).display)"""
CHARTS = """Object.fromEntries([...document.querySelectorAll('figure[data-last]')].map(
  (f) => [f.querySelector('b').textContent, f.querySelector('figcaption span').textContent]))"""
CLOUD: Row = {"requests": 2, "prompt_tokens": 41_300, "cached_tokens": 60}
CLOUD |= {"completion_tokens": 512, "cost": 0.0625}
NOWHERE: Row = {name: 0 if isinstance(value, int) else 0.0 for name, value in CLOUD.items()}
TOTALS: Row = {
    **{"requests": 4, "cached_tokens": 40, "prefilled_tokens": 60, "hit_rate": 0.4},
    **{"completion_tokens": 7, "speed": 1000, "saved_s": 1, "decode_speed": 45.5},
    **{"match_share": 0.4, "match_tokens": 40, "disconnects": 0},
    **{"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0, "decode_forwards": 7},
    **{"forwards_per_token": 1.0, "matches": {}},
}
STATE: Row = {"workers": [], "entries": []}
NASTY = "openai/<img src=x onerror='window.hurt = 1'>"


def request(number: int, served_by: str, **fields: Any) -> Row:
    return {
        **{"number": number, "session": "s", "prompt": 100, "cached": 40, "prefilled": 60},
        **{"source": "slot", "ttft_ms": 80, "speed": 1000, "ended": "stop", "cloud": False},
        **{"match": "prefix", "decode_speed": 45.5, "images": 0, "image_ms": None},
        **{"divergence": None, "served_by": served_by, "fallback": ""},
    } | fields


ELSEWHERE: Row = {"cloud": True, "prefilled": 0, "source": "none", "match": "none"}
ELSEWHERE |= {"speed": None, "decode_speed": None, "ended": "answered", "ttft_ms": 9_000}
LOCAL = [request(1, "hearth/big"), request(2, "hearth/big")]
MIXED = [
    request(1, "hearth/big"),
    request(2, "openai/gpt-4o", fallback="hearth/big overloaded", **ELSEWHERE),
    request(3, "hearth/big", fallback="openai/gpt-4o timeout"),
    request(4, NASTY, **ELSEWHERE),
]


@dataclass
class Seen:
    cells: list[list[str]] = field(default_factory=list)
    answerers: list[str] = field(default_factory=list)  # how the column is displayed
    cloud: str | None = None  # what is said of it beside the sums; None where nothing is shown
    charts: dict[str, str] = field(default_factory=dict)
    hurt: Any = None
    overflow: int = -1
    errors: list[str] = field(default_factory=list)


def app(requests: list[Row], cloud: Row, ended: asyncio.Event) -> web.Application:
    """Return a server of the page that tells these requests, until it has `ended`."""
    totals = TOTALS | {"cloud": cloud}
    told = {"requests": requests, "totals": totals, "state": STATE, "sessions": []}

    async def events(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(asked)
        await response.write(f"event: snapshot\ndata: {json.dumps(told)}\n\n".encode())
        await ended.wait()
        return response

    async def index(_: web.Request) -> web.FileResponse:
        return web.FileResponse(PAGES / "index.html")

    made = web.Application()
    made.router.add_get("/dashboard", index)
    made.router.add_get("/dashboard/events", events)
    made.router.add_static("/dashboard", PAGES)
    return made


async def look(tab: Page, server: TestServer, shot: Path) -> Seen:
    seen = Seen()
    await tab.look(1180, 900, "light")
    await tab.open(str(server.make_url("/dashboard")))
    await tab.until("document.querySelectorAll('#request-rows tr').length > 1")
    await tab.value("document.getElementById('requests').open = true")
    await tab.value(CHECKS)
    seen.cells = await tab.value(CELLS)
    seen.answerers = await tab.value(ANSWERERS)
    shown = "(() => { const c = document.getElementById('cloud');"
    seen.cloud = await tab.value(f"{shown} return c.hidden ? null : c.textContent; }})()")
    seen.charts = await tab.value(CHARTS)
    seen.hurt = await tab.value("window.hurt ?? null")
    seen.overflow = await tab.value("checks.overflow()")
    await tab.shoot(shot)
    seen.errors = list(tab.errors)
    return seen


async def watched(artefacts: Path, devtools: str) -> list[Seen]:
    seen = []
    for name, requests, cloud in (("local", LOCAL, NOWHERE), ("mixed", MIXED, CLOUD)):
        ended = asyncio.Event()
        async with TestServer(app(requests, cloud, ended)) as server, page(devtools) as tab:
            seen.append(await look(tab, server, artefacts / f"cloud-{name}.png"))
            ended.set()
    return seen


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Seen]]:
    artefacts = Path(os.environ.get("HEARTH_ARTEFACTS") or tmp_path_factory.mktemp("cloud"))
    artefacts.mkdir(parents=True, exist_ok=True)
    with chromium() as devtools:
        yield asyncio.run(watched(artefacts, devtools))


def test_where_one_model_answers_all_the_page_does_not_name_it(pages: list[Seen]) -> None:
    local, _ = pages
    assert local.cloud is None
    assert set(local.answerers) == {"none"}


def test_each_row_says_who_answered_and_after_whom(pages: list[Seen]) -> None:
    _, mixed = pages
    assert "none" not in mixed.answerers
    assert [row[13] for row in reversed(mixed.cells)] == [
        "hearth/big",
        "openai/gpt-4o (after hearth/big overloaded)",
        "hearth/big (after openai/gpt-4o timeout)",
        NASTY,
    ]


def test_what_others_read_and_wrote_stands_apart(pages: list[Seen]) -> None:
    _, mixed = pages
    assert mixed.cloud == "2 answered elsewhere: 41,300 tokens read, 512 written, $0.0625"
    row = mixed.cells[2]  # of the second request
    assert row[2:7] == ["100", "40", "–", "", ""]  # no prefill of ours, no source, no match


def test_the_charts_are_of_local_answers(pages: list[Seen]) -> None:
    local, mixed = pages
    assert mixed.charts["Time to first token"] == local.charts["Time to first token"]
    assert "9.0 s" not in mixed.charts["Time to first token"]


def test_a_name_is_text_and_the_page_has_no_faults(pages: list[Seen]) -> None:
    for seen in pages:
        assert (seen.hurt, seen.overflow, seen.errors) == (None, 0, [])
