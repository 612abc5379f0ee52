"""Tells what requests were worth by right sums, and errors without a trace of a machine."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import example, given, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.results import ModelFacts
from hearth.commands.bench.server import Server
from hearth.commands.bench.servers.started_server import StartedServer
from hearth.commands.bench.workload import SCALES, Visit
from hearth.commands.bench.workloads.ask import ERROR_CHARS_MAX, ask, errors_of, request_values
from hearth.commands.bench.workloads.counted_tokens.counted import measured
from hearth.commands.replay.player import Row, Target
from hearth.commands.replay.traces import CHAT_PATH, Captured
from hearth.commands.stream_client import Outcome, Reading, Tokens

IDS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


def row(
    ids: list[int] | None,
    *,
    error: str = "",
    prefilled: int = 1,
    ttft_s: float | None = 0.5,
    status: int = 200,
) -> Row:
    tokens = Tokens(len(ids or ()), 0, prefilled, 1, "")
    outcome = Outcome(status, tokens, ttft_s, 1.0, error, Reading())
    return Row(0, "some", "chat", outcome, ids)


def ideal(before: list[list[int]], prompts: list[list[int]]) -> int:
    """Count one by one which tokens no earlier prompt began with."""
    read, known = 0, list(before)
    for prompt in prompts:
        found = [
            size
            for size in range(len(prompt))
            if any(prompt[:size] == each[:size] for each in known)
        ]
        read += len(prompt) - max(found)
        known.append(prompt)
    return read


@given(st.lists(IDS, max_size=4), st.lists(IDS, min_size=1, max_size=5))
@example([[1, 1]], [[1, 1], [1, 1, 0]])
def test_the_ideal_counts_what_no_earlier_prompt_had(
    before: list[list[int]], prompts: list[list[int]]
) -> None:
    values = request_values([row(ids) for ids in prompts], [row(ids) for ids in before])
    assert values["ideal_tokens"] == ideal([[], *before], prompts)
    assert values["prompt_tokens"] == sum(map(len, prompts))
    assert set(values) <= set(MEASURES)


@given(st.lists(st.tuples(IDS, st.booleans(), st.floats(0, 9)), min_size=1, max_size=6))
def test_what_failed_is_counted_and_nothing_else_of_it(
    told: list[tuple[list[int], bool, float]],
) -> None:
    rows = [
        row(ids, error="bad" if fails else "", ttft_s=ttft_s, prefilled=2)
        for ids, fails, ttft_s in told
    ]
    values = request_values(rows)
    answered = [each for each in told if not each[1]]
    assert values["failed"] + values["requests"] == len(told)
    assert values["requests"] == len(answered)
    assert values["claimed_tokens"] == 2 * len(answered)
    assert values["prompt_tokens"] == sum(len(ids) for ids, *_ in answered)
    waits = sorted(ttft_s for *_, ttft_s in answered)
    assert ("ttft_p50_s" in values) == bool(waits) == ("ideal_tokens" in values)
    if waits:
        assert waits[0] <= values["ttft_p50_s"] <= values["ttft_p95_s"] <= waits[-1]


def test_a_prompt_whose_stream_broke_off_is_known_to_the_next_one() -> None:
    values = request_values([row([1, 2, 3], error="broke off"), row([1, 2, 3, 4])])
    assert (values["ideal_tokens"], values["requests"]) == (1, 1)


def test_without_all_ids_there_is_no_ideal() -> None:
    assert "ideal_tokens" not in request_values([row([1, 2]), row(None)])
    assert "ideal_tokens" not in request_values([])


def test_without_a_meter_what_was_read_is_what_the_server_says() -> None:
    rows = [row([1, 2], prefilled=2)]
    assert measured(rows, {"wall_s": 1.0}).values["read_tokens"] == 2
    assert measured(rows, {"read_tokens": 7.0}).values["read_tokens"] == 7
    assert measured(rows, {}, before=rows).values["ideal_tokens"] == 1
    assert measured(rows, {}, errors=("late",)).errors == ("late",)


# ---------------------------------------------------------------- errors


def test_errors_are_told_once_with_how_often_and_are_few() -> None:
    rows = [row([1], error=each) for each in ("a", "b", "a", "", "c", "d")]
    assert errors_of(rows) == ("2x a", "b", "c")


def test_an_error_is_one_short_line_without_the_users_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/ada"))
    (told,) = errors_of([row([1], error="no\n  /Users/ada/model at /v1/chat " + "x" * 500)])
    assert told.startswith("no ~/model at /v1/chat xxx") and len(told) == ERROR_CHARS_MAX


# ---------------------------------------------------------------- asking


def visit(url: str) -> Visit:
    facts = ModelFacts("tiny", "text", "qwen3", 1)
    running = StartedServer(Target(url, extra={"a": 1}))
    return Visit(Server("some"), running, facts, SCALES["quick"], 0)


ASKED = Captured("some", "chat", CHAT_PATH, {}, {"messages": []}, "", 0.0, 1.0)


@pytest.mark.process
def test_a_server_that_is_gone_has_failed_each_request() -> None:
    rows = asyncio.run(ask(visit("http://127.0.0.1:1"), [ASKED, ASKED]))
    values = request_values(rows)
    assert (values["requests"], values["failed"]) == (0, 2)
    assert len(errors_of(rows)) == 1 and errors_of(rows)[0].startswith("2x ")


def refusing(rows: list[Captured], **asked: Any) -> tuple[list[Row], list[dict[str, Any]]]:
    """Ask a server that knows only chat completions, and refuses those too; return its bodies."""
    bodies: list[dict[str, Any]] = []

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def chat(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.json_response({"error": "no"}, status=418)

    async def play() -> list[Row]:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post(CHAT_PATH, chat)
        async with TestServer(app) as server:
            return await ask(visit(str(server.make_url(""))), rows, **asked)

    return asyncio.run(play()), bodies


@pytest.mark.process
def test_bodies_are_as_short_as_is_asked_and_have_what_the_server_always_gets() -> None:
    rows, bodies = refusing([ASKED], tokens_max=3)
    assert [body["max_tokens"] for body in bodies] == [3] and bodies[0]["a"] == 1
    assert errors_of(rows)[0].startswith("418") and request_values(rows)["failed"] == 1


@pytest.mark.process
def test_a_dialect_that_a_server_does_not_know_is_asked_as_chat() -> None:
    told = [{"role": "user", "content": "hello"}]
    asked = replace(ASKED, dialect="messages", path="/v1/messages", body={"messages": told})
    rows, bodies = refusing([asked, asked])
    assert [body["messages"] for body in bodies] == [told, told]
    assert {row.outcome.status for row in rows} == {418}
    rows, bodies = refusing([asked, ASKED])
    assert len(bodies) == 1, "it answered one in its own dialect: nothing is asked twice"
    assert [row.outcome.status for row in rows] == [404, 418]
