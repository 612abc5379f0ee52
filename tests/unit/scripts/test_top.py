"""The terminal's view: fixed figures in, text out; a server that goes and comes back."""

import asyncio
import io
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, strategies as st
from rich.cells import cell_len
from rich.console import Console

from hearth.commands.server_client import Server
from hearth.commands.top import PATHS, Watch, options_of
from hearth.commands.top_view import Limits, Snapshot, limits_in, seconds, view

Row = dict[str, Any]
pytestmark = pytest.mark.process

MB = 1024 * 1024
LIMITS = Limits()
NASTY = "a\x1b[31m\x1b]0;title\x07\r\n\u202e[bold red]x[/bold red] \u540d\u524d\ud83d"

WORKER: Row = {
    "id": 0,
    "state": "ready",
    "running": 2,
    "waiting": 1,
    "wait_s": 12.5,
    "restarts": 3,
    "active_bytes": 5_321 * MB,
    "model": "Qwen3.5-9B-4bit",
}
PREFILL: Row = {
    "request_id": "f7ab611a805640fba666",
    "worker": 0,
    "prompt_tokens": 41_200,
    "cached_tokens": 1_024,
    "done_tokens": 10_300,
    "age_s": 42.25,
}
CACHE: Row = {
    "worker": 0,
    "bytes": 921 * MB,
    "budget_bytes": 1_024 * MB,
    "slots": [{"slot": 0}, {"slot": 1}],
    "slots_max": 4,
    "slots_bytes": 318 * MB,
    "evictions": 17,
    "memory_limit_bytes": 21_504 * MB,
    "disk": {"bytes_used": 2_048 * MB},
    "counts": {"vlm_retreat": 0},
    "sessions": {"lost_tokens": 90, "exact_key_rejected_by_model_lcp": 0},
    "vision": {"encoder_calls": 12, "encoder_s": 3.45, "failures": 1, "bytes": 25 * MB},
}
REQUEST: Row = {
    "at": time.mktime((2026, 11, 22, 10, 39, 15, 0, 0, -1)) + 0.25,  # told in local time
    "session": "6f0c3a5e-claude",
    "prompt": 41_200,
    "cached": 40_960,
    "prefilled": 240,
    "source": "ssd",
    "completion": 101,
    "queue_ms": 12,
    "ttft_ms": 84,
    "finish_ms": 2_584,
    "ended": "length",
    "divergence": {"lost": 1_234, "cause": "history rewritten"},
}
TOTALS: Row = {
    "requests": 40,
    "prompt_tokens": 100_000,
    "cached_tokens": 93_100,
    "prefilled_tokens": 6_900,
}
SESSION: Row = {
    "session": "6f0c3a5e-claude",
    "agent": "reviewer",
    "lines": 2,
    "turns": 31,
    "client": "Claude Code 2.1",
    "lost": 70,
    "decode_speed": 45.5,
    "idle_s": 4.0,
    "worker": 0,
}
SNAPSHOT = Snapshot(
    "http://127.0.0.1:4000",
    health={
        "status": "ok",
        "version": "0.1.0",
        "workers": [WORKER],
        "queue": [{"request_id": "q"}],
        "prefills": [PREFILL],
    },
    cache={"workers": [CACHE], "totals": TOTALS},
    sessions={"recent": [REQUEST], "sessions": [SESSION]},
)


def drawn(snapshot: Snapshot, limits: Limits = LIMITS, width: int = 80, **how: Any) -> str:
    """Return what a terminal is sent."""
    console = Console(file=io.StringIO(), record=True, width=width, **how)
    console.print(view(snapshot, limits))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line_of(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line.split()


def with_(body: str, **fields: Any) -> Snapshot:
    return replace(SNAPSHOT, **{body: getattr(SNAPSHOT, body) | fields})


# ---------------------------------------------------------------- what is shown


def test_all_figures_stand_in_eighty_columns() -> None:
    text = drawn(SNAPSHOT)
    assert text.splitlines()[0] == "hearth 0.1.0  http://127.0.0.1:4000  ok  1 in the queue"
    assert line_of(text, "0      ready") == [
        *("0", "ready", "Qwen3.5-9B-4bit", "2", "1", "12.5", "s", "3", "5,321", "21,504")
    ]
    assert line_of(text, "f7ab")[2:] == ["10,300", "41,200", "25", "42.2", "s"]
    cache = [cell for cell in line_of(text, "0          921") if not set(cell) & set("━╸╺")]
    assert cache == ["0", "921.0", "1,024.0", "89", "2/4", "318.0", "2,048.0", "17"]
    assert "\nhit rate 93.1 % of 100,000 tokens in 40 requests\n" in text
    assert "\ntokens   93,100 saved, 6,900 prefilled, 90 lost\n" in text
    assert "worker 0 vision  12 images encoded in 3.5 s, 1 failed, 25.0 MB kept\n" in text
    assert line_of(text, "10:39:15") == [
        *("10:39:15", "6f0c3a5e-…", "41,200", "40,960", "240", "ssd", "84", "ms", "40"),
        *("1,234", "history", "r…"),
    ]
    assert line_of(text, "reviewer: 6f0c3a5e-claude") == [
        *("reviewer:", "6f0c3a5e-claude", "Claude", "Code", "2.1", "31", "46", "70", "4.0", "s")
    ]


def test_no_line_is_wider_than_the_terminal() -> None:
    for width in (60, 80, 100, 160):
        assert max(cell_len(line) for line in drawn(SNAPSHOT, width=width).splitlines()) <= width


def test_a_narrow_terminal_shows_who_and_why_before_when_and_how_fast() -> None:
    text = drawn(SNAPSHOT, limits_in(20, SNAPSHOT, width=60), width=60)
    assert "Qwen3.5-9B-4bit" in text
    row = line_of(text, "6f0c3a5…")
    assert row[1:7] == ["41,200", "40,960", "240", "ssd", "84", "ms"]
    assert row[7].startswith("1,234")
    assert "10:39" not in text and "restarts" not in text
    assert limits_in(20, SNAPSHOT, width=80).is_narrow is False


def test_a_wide_terminal_shows_names_and_causes_whole() -> None:
    text = drawn(SNAPSHOT, width=120)
    assert "10:39:15 6f0c3a5e-claude " in text
    assert "1,234 history rewritten" in text


def test_without_colour_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    plain = drawn(SNAPSHOT, force_terminal=True, color_system="standard")
    assert not [code for code in ("\x1b[3", ";3") if code in plain], "no colour is sent"
    monkeypatch.delenv("NO_COLOR")
    coloured = drawn(SNAPSHOT, force_terminal=True, color_system="standard")
    assert "\x1b[32mready" in coloured
    console = Console(file=io.StringIO(), width=80)
    console.print(view(SNAPSHOT, LIMITS))
    assert isinstance(console.file, io.StringIO)
    assert "ready" in console.file.getvalue() and "\x1b" not in console.file.getvalue()


def test_a_server_before_its_first_request_has_no_hit_rate() -> None:
    empty = Snapshot("u", {"status": "ok", "workers": [WORKER]}, {"workers": [{"worker": 0}]})
    text = drawn(empty)
    assert "hit rate - of 0 tokens in 0 requests\ntokens   0 saved, 0 prefilled, 0 lost" in text
    assert "session" not in text and "prefilling" not in text and "vision" not in text


def test_the_sums_are_the_servers_and_what_was_lost_is_of_all_workers_together() -> None:
    other = CACHE | {"worker": 1, "sessions": {"lost_tokens": 10}}
    text = drawn(with_("cache", workers=[CACHE, other]))
    assert "hit rate 93.1 % of 100,000 tokens in 40 requests\n" in text
    assert "93,100 saved, 6,900 prefilled, 100 lost\n" in text


def test_a_worker_that_cannot_tell_says_why() -> None:
    absent = {"worker": 1, "state": "loading", "error": "This worker is not ready, it is loading"}
    text = drawn(with_("cache", workers=[CACHE, absent]))
    assert "worker 1: This worker is not ready, it is loading\n" in text
    assert line_of(text, "1 ")[:3] == ["1", "-", "-"]


def test_a_counter_that_must_stay_zero_is_told_only_when_it_did_not() -> None:
    assert "please report" not in drawn(SNAPSHOT)
    counts = CACHE["sessions"] | {"exact_key_rejected_by_model_lcp": 2}
    text = drawn(with_("cache", workers=[CACHE | {"sessions": counts}]))
    assert "worker 0: exact_key_rejected_by_model_lcp is 2; please report it\n" in text


DRAFTS: Row = {
    "mode": "auto",
    "state": "on",
    "reason": "",
    "forwards": 620,
    "rows": 1_100,
    "tokens": 1_000,
    "speedup_estimate": 1.4,
    "by_source": {
        "forced": {"drafted": 310, "accepted": 300},
        "history": {"drafted": 1_200, "accepted": 80},
        "model": {"drafted": 0, "accepted": 0},
    },
}


def test_a_worker_that_drafts_tells_its_gain_and_each_source() -> None:
    text = drawn(with_("cache", workers=[CACHE | {"speculation": DRAFTS}]))
    line = "worker 0 drafts  on (auto), 0.62 forwards a token, about 1.40 times as fast\n"
    assert line in text
    rows = [line.split() for line in text.splitlines() if " forced " in line or "history " in line]
    assert rows[0] == ["0", "forced", "310", "300", "96"]
    assert rows[1] == ["0", "history", "1,200", "80", "6"]
    assert "model  " not in text.partition("drafts from")[2], "nothing came from there"


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (None, None),
        ({}, None),
        ({"mode": "off", "state": "off", "reason": ""}, "off (off)"),
        (
            {"mode": "auto", "state": "off", "reason": "exact mode"},
            "off (auto): exact mode",
        ),
        ({"mode": "auto", "state": "on", "speedup_estimate": None, "tokens": 0}, "on (auto)"),
        ({"mode": NASTY, "state": "off", "reason": NASTY, "by_source": 7}, "off (a?[31m"),
        ({"state": "on", "mode": "lookup", "forwards": "x", "tokens": True}, "on (lookup)"),
    ],
)
def test_what_a_worker_says_of_drafts_is_shown_as_far_as_it_makes_sense(
    told: Any, shown: str | None
) -> None:
    text = drawn(with_("cache", workers=[CACHE | {"speculation": told}]))
    assert "drafts from" not in text
    found = [line for line in text.splitlines() if "drafts  " in line]
    assert [line.startswith(f"worker 0 drafts  {shown}") for line in found] == [True] * bool(shown)


def test_a_cancelled_request_says_so_and_has_no_speed() -> None:
    gone = REQUEST | {"completion": 0, "divergence": None, "ended": "client_closed"}
    text = drawn(with_("sessions", recent=[gone]))
    assert line_of(text, "10:39:15")[-2:] == ["-", "client_closed"]


def test_a_request_that_waited_for_a_slot_says_so_where_nothing_was_lost() -> None:
    waited = REQUEST | {"queue_ms": 12_300, "divergence": None}
    assert line_of(drawn(with_("sessions", recent=[waited])), "10:39")[-3:] == [
        "waited",
        "12.3",
        "s",
    ]
    lost = REQUEST | {"queue_ms": 12_300}
    assert "waited" not in drawn(with_("sessions", recent=[lost])).replace("lost or waited", "")
    quick = waited | {"queue_ms": 999}
    assert line_of(drawn(with_("sessions", recent=[quick])), "10:39")[-1] == "40"


@pytest.mark.parametrize(("completion", "shown"), [(17, "160"), (16, "-"), (2, "-")])
def test_the_speed_is_that_after_the_first_token_where_enough_followed(
    completion: int, shown: str
) -> None:
    quick = REQUEST | {"completion": completion, "finish_ms": REQUEST["ttft_ms"] + 100}
    text = drawn(with_("sessions", recent=[quick | {"divergence": None}]))
    assert line_of(text, "10:39:15")[-1] == shown


def test_a_very_wide_terminal_does_not_tear_a_row_apart() -> None:
    assert max(cell_len(line.rstrip()) for line in drawn(SNAPSHOT, width=300).splitlines()) <= 140


def test_more_sessions_than_are_shown_are_counted() -> None:
    text = drawn(with_("sessions", sessions=[SESSION] * 7), Limits(sessions=4))
    assert text.count("reviewer") == 4 and "and 3 sessions more\n" in text


def test_old_figures_are_called_old() -> None:
    text = drawn(replace(SNAPSHOT, problem="http://h does not answer", age_s=12.0))
    assert "http://h does not answer These figures are 12.0 s old." in text
    assert "hit rate 93.1 %" in text
    assert "figures" not in drawn(Snapshot("http://h", problem="http://h does not answer"))


@pytest.mark.parametrize("height", [24, 30, 50])
@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_shown_live_fits_the_terminal(height: int, workers: int) -> None:
    snapshot = replace(
        SNAPSHOT,
        health=SNAPSHOT.health | {"workers": [WORKER] * workers},
        cache={"workers": [CACHE | {"speculation": DRAFTS}] * workers},
        sessions={"recent": [REQUEST] * 32, "sessions": [SESSION] * 32},
    )
    limits = limits_in(height, snapshot)
    lines = drawn(snapshot, limits).splitlines()
    assert limits.requests >= 3
    assert len(lines) <= height or limits.requests == 3
    assert len(drawn(snapshot, replace(limits, requests=limits.requests + 4)).splitlines()) > height


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        *((0, "0.0 s"), (-1, "0.0 s"), (0.084, "84 ms"), (12.34, "12.3 s"), (240, "4 min")),
        *((7200, "2 h"), (1e12, "9999 h")),
    ],
)
def test_times_are_short(amount: float, shown: str) -> None:
    assert seconds(amount) == shown


# ---------------------------------------------------------------- what clients may name themselves


def test_a_name_is_never_obeyed_by_the_terminal() -> None:
    row, session = REQUEST | {"session": NASTY}, SESSION | {"session": NASTY, "agent": NASTY}
    text = drawn(with_("sessions", recent=[row], sessions=[session]), width=160)
    assert not set(text) & set("\x1b\x07\r\u202e\ud83d")
    assert "a?[31m?]0;title????[bold red]x[/bold red] \u540d\u524d?" in text


def test_a_name_of_wide_letters_does_not_move_the_columns() -> None:
    wide = REQUEST | {"session": "\u540d" * 50}
    text = drawn(with_("sessions", recent=[REQUEST, wide]))
    first, second = [line for line in text.splitlines() if line.startswith("10:39:15")]
    assert cell_len(first[: first.index("41,200")]) == cell_len(second[: second.index("41,200")])


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def rows(known: Row) -> st.SearchStrategy[Any]:
    """Rows with the fields of `known`, each of which may be missing or be anything at all."""
    fields = {name: st.just(value) | ANY for name, value in known.items()}
    return st.fixed_dictionaries({}, optional=fields)


@given(st.data())
def test_whatever_a_server_tells_is_shown_in_eighty_columns(data: st.DataObject) -> None:
    def some(known: Row) -> Any:
        return data.draw(st.lists(rows(known), max_size=2) | ANY)

    snapshot = Snapshot(
        "http://h",
        {"status": data.draw(ANY), "workers": some(WORKER), "prefills": some(PREFILL)},
        {"workers": some(CACHE)},
        {"recent": some(REQUEST), "sessions": some(SESSION)},
    )
    text = drawn(snapshot)
    assert all(cell_len(line) <= 80 for line in text.splitlines())
    assert all(c.isprintable() or c == "\n" for c in text)


def spoilt(told: Any, bad: Any) -> Iterator[Any]:
    """Yield `told` with each of its parts, at any depth, as `bad`."""
    yield bad
    keys = told if isinstance(told, dict) else range(len(told)) if isinstance(told, list) else ()
    for key in keys:
        for part in spoilt(told[key], bad):
            copy = told.copy()
            copy[key] = part
            yield copy


@pytest.mark.parametrize(
    "bad",
    [None, "x", 10**400, -(10**400), -1, float("nan"), float("inf"), [5], {"a": 5}, True],
    ids=lambda bad: str(bad)[:8],
)
def test_each_part_may_be_nonsense_and_the_rest_is_shown(bad: Any) -> None:
    for name in ("health", "cache", "sessions"):
        for body in spoilt(getattr(SNAPSHOT, name), bad):
            if isinstance(body, dict):
                assert "hearth" in drawn(replace(SNAPSHOT, **{name: body}))


# ---------------------------------------------------------------- a server that comes and goes


class Stage:
    """A server whose answers are set by the test."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "/health": SNAPSHOT.health,
            "/v1/cache": SNAPSHOT.cache,
            "/v1/sessions": SNAPSHOT.sessions,
        }

    def app(self) -> web.Application:
        app = web.Application()
        for path in PATHS.values():
            app.router.add_get(path, self.answer)
        return app

    async def answer(self, request: web.Request) -> web.Response:
        body = self.answers[request.path]
        if body is None:
            return web.json_response({"error": "no key"}, status=401)
        if isinstance(body, bytes):
            return web.Response(body=body, content_type="application/json")
        return web.json_response(body)


@pytest.mark.process
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5_000, b"\xff\xfe"],
    ids=lambda body: str(body[:6]),
)
def test_what_is_no_answer_of_ours_is_a_problem_that_is_told(body: bytes) -> None:
    async def ask() -> None:
        stage = Stage()
        stage.answers["/v1/cache"] = body
        server = TestServer(stage.app())
        await server.start_server()
        async with Server(f"http://127.0.0.1:{server.port}", timeout_s=30) as asked:
            told = await Watch(asked).look()
        assert told.problem and told.health == SNAPSHOT.health
        assert told.problem.split("\n")[0] in drawn(told, width=400)
        await server.close()

    asyncio.run(ask())


def ticks(*times: float) -> Iterator[float]:
    yield from times


@pytest.mark.process
def test_a_server_that_goes_is_shown_as_it_was_until_it_comes_back() -> None:
    async def body() -> None:
        stage, clock = Stage(), ticks(0.0, 1.0, 31.0, 60.0)
        server = TestServer(stage.app())
        await server.start_server()
        port = server.port
        assert port is not None
        async with Server(f"http://127.0.0.1:{port}", timeout_s=30) as asked:
            watch = Watch(asked, lambda: next(clock))
            told = await watch.look()
            assert (told.problem, told.age_s, told.cache) == ("", 0.0, SNAPSHOT.cache)
            await server.close()
            told = await watch.look()
            assert "does not answer" in told.problem
            assert (told.age_s, told.health) == (30.0, SNAPSHOT.health)
            stage.answers["/v1/sessions"] = {"recent": [], "sessions": []}
            again = TestServer(stage.app(), port=port)
            await again.start_server()
            told = await watch.look()
            assert (told.problem, told.age_s, told.sessions["recent"]) == ("", 0.0, [])
            await again.close()

    asyncio.run(body())


@pytest.mark.process
def test_what_is_told_is_shown_though_the_rest_is_refused() -> None:
    async def body() -> None:
        stage = Stage()
        stage.answers |= {"/v1/cache": None, "/v1/sessions": [1]}
        server = TestServer(stage.app())
        await server.start_server()
        async with Server(f"http://127.0.0.1:{server.port}") as asked:
            told = await Watch(asked).look()
        assert "GET /v1/cache is answered with 401" in told.problem
        assert (told.health, told.cache, told.sessions) == (SNAPSHOT.health, {}, {})
        stage.answers["/v1/cache"] = SNAPSHOT.cache
        async with Server(f"http://127.0.0.1:{server.port}") as asked:
            told = await Watch(asked).look()
        assert told.problem == "/v1/sessions is answered by something else."
        await server.close()

    asyncio.run(body())


def test_it_never_waits_long_for_a_server() -> None:
    assert options_of([]).timeout == 10
