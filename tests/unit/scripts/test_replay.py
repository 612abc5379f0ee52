"""The replay's figures are right: the ideal, the three usage shapes, what is sent and when."""

import asyncio
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, strategies as st

from hearth.commands.replay.ideal_cache import ideal_cached, percentile
from hearth.commands.replay.player import Row, Target, replay_together
from hearth.commands.replay.traces import (
    Captured,
    Spoken,
    answer_key,
    as_chat,
    load_trace,
    request_body,
    waits_for,
    with_live,
)
from hearth.commands.stream_client import READERS, Outcome, Reading, SseReader, Tokens, tokens_of
from hearth.shared.errors import RequestError
from scripts.replay.__main__ import excesses, summary, summary_lines
from tests.helpers.clients.captured_events import KV, captured, chat_events

TOLD = Tokens(prompt=100, cached=90, prefilled=12, completion=8, source="ram")


# ---------------------------------------------------------------- the ideal


def naive_ideal(prompts: list[list[int] | None]) -> list[int | None]:
    """Compare token by token with each earlier prompt."""
    cached: list[int | None] = []
    for number, prompt in enumerate(prompts):
        if prompt is None:
            cached.append(None)
            continue
        longest = 0
        for earlier in prompts[:number]:
            shared = 0
            for mine, theirs in zip(prompt, earlier or (), strict=False):
                if mine != theirs:
                    break
                shared += 1
            longest = max(longest, shared)
        cached.append(min(longest, len(prompt) - 1))
    return cached


PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=12)


@given(st.lists(st.none() | PROMPT, max_size=12))
def test_the_ideal_is_the_longest_prefix_of_any_earlier_prompt(
    prompts: list[list[int] | None],
) -> None:
    assert ideal_cached(prompts) == naive_ideal(prompts)


def test_the_last_token_of_a_repeated_prompt_is_not_cached() -> None:
    assert ideal_cached([[1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [1, 9]]) == [0, 2, 3, 1]


def test_a_refused_prompt_is_nobodys_prefix() -> None:
    assert ideal_cached([None, [1, 2], None, [1, 2, 3]]) == [None, 0, None, 2]


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([4, 1, 3, 2], 0.5) == 3
    assert percentile(list(range(100)), 0.95) == 95


# ---------------------------------------------------------------- what streams tell


def messages_events() -> list[Any]:
    started = {"input_tokens": 95, "cache_read_input_tokens": 5, "output_tokens": 0}
    ended = {"input_tokens": 10, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 90}
    ended |= {"output_tokens": 8}
    return [
        {"type": "message_start", "message": {"usage": started}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm "}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "one "}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "two"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {}, "usage": ended | {"kv_cache": KV}},
        {"type": "message_stop"},
    ]


def responses_events() -> list[Any]:
    usage = {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 90}}
    usage |= {"output_tokens": 8, "kv_cache": KV}
    return [
        {"type": "response.created", "response": {"usage": None}},
        {"type": "response.reasoning_text.delta", "delta": "hm "},
        {"type": "response.output_text.delta", "delta": "one "},
        {"type": "response.output_text.delta", "delta": "two"},
        {"type": "response.incomplete", "response": {"status": "incomplete", "usage": usage}},
    ]


STREAMS: dict[str, Callable[[], list[Any]]] = {
    "chat": chat_events,
    "messages": messages_events,
    "responses": responses_events,
}


def read(dialect: str, events: list[Any]) -> tuple[Reading, list[bool]]:
    reading = Reading()
    return reading, [READERS[dialect](reading, event) for event in events]


@pytest.mark.parametrize("dialect", STREAMS)
def test_each_dialect_tells_text_and_tokens(dialect: str) -> None:
    reading, _ = read(dialect, STREAMS[dialect]())
    assert "".join(reading.text) == "one two"
    assert "".join(reading.reasoning) == "hm "
    assert reading.is_complete and not reading.error
    assert tokens_of(dialect, reading) == TOLD


@pytest.mark.parametrize(("dialect", "first"), [("chat", 1), ("messages", 3), ("responses", 1)])
def test_the_first_output_is_the_first_text_of_any_kind(dialect: str, first: int) -> None:
    _, has_output = read(dialect, STREAMS[dialect]())
    assert has_output.index(True) == first


@pytest.mark.parametrize("dialect", STREAMS)
def test_a_stream_that_breaks_off_is_not_complete(dialect: str) -> None:
    reading, _ = read(dialect, STREAMS[dialect]()[:3])
    assert not reading.is_complete


def test_errors_in_a_stream_are_seen() -> None:
    assert "boom" in read("chat", [{"error": {"message": "boom"}}])[0].error
    assert "boom" in read("messages", [{"type": "error", "error": {"message": "boom"}}])[0].error
    failed = {"type": "response.failed", "response": {"error": {"message": "boom"}}}
    assert "boom" in read("responses", [failed])[0].error


def test_who_does_not_tell_what_was_prefilled_prefilled_the_rest() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 8}
    expected = Tokens(prompt=100, cached=0, prefilled=100, completion=8, source="")
    assert tokens_of("chat", Reading(usage=usage)) == expected
    usage["prompt_tokens_details"] = {"cached_tokens": 90}
    told = tokens_of("chat", Reading(usage=usage))
    assert told is not None and told.prefilled == 10
    assert tokens_of("chat", Reading()) is None


@given(st.lists(st.integers(1, 40), max_size=30), st.sampled_from(["\n", "\r\n"]))
def test_events_are_read_however_the_bytes_are_cut(sizes: list[int], newline: str) -> None:
    text = 'event: a\ndata: {"x": "é"}\n\n: comment\n\ndata: one\ndata: two\n\ndata: open end'
    raw = text.replace("\n", newline).encode()
    reader, found, start = SseReader(), [], 0
    for size in sizes:
        found += reader.feed(raw[start : start + size])
        start += size
    found += [*reader.feed(raw[start:]), *reader.close()]
    assert found == ['{"x": "é"}', "one\ntwo", "open end"]


# ---------------------------------------------------------------- the sums


def row(number: int, tokens: Tokens | None, ids: list[int] | None, status: int = 200) -> Row:
    outcome = Outcome(status, tokens, 0.5, 1.0, "" if tokens else "no", Reading())
    return Row(number, "trace", "chat", outcome, ids)


def cost(prompt: int, cached: int, prefilled: int) -> Tokens:
    return Tokens(prompt, cached, prefilled, 8, "slot")


def sums(rows: list[Row]) -> Any:
    return summary(rows, wall_s=2.0)


def test_the_ratio_is_what_was_prefilled_over_what_had_to_be() -> None:
    told = sums(
        [
            row(0, cost(4, 0, 4), [1, 2, 3, 4]),
            row(1, None, None, status=400),
            row(2, cost(6, 3, 3), [1, 2, 3, 4, 5, 6]),  # one more than needed
        ]
    )
    assert (told.requests, told.refused, told.failed) == (3, 1, 0)
    assert (told.prompt, told.cached, told.prefilled, told.ideal) == (10, 3, 7, 6)
    assert told.ratio == pytest.approx(7 / 6)
    assert told.hit == pytest.approx(0.3)
    assert told.excess_max == 1
    assert "1.1667" in "\n".join(summary_lines(told))


def test_a_broken_stream_was_a_prompt_but_is_in_no_sum() -> None:
    rows = [row(0, None, [1, 2, 3]), row(1, cost(4, 3, 1), [1, 2, 3, 4])]
    assert excesses(rows) == [None, 0]
    told = sums(rows)
    assert (told.failed, told.prefilled, told.ideal) == (1, 1, 1)


def test_a_warm_server_is_named() -> None:
    assert not any("warm" in line for line in summary_lines(sums([row(0, cost(2, 0, 2), [1, 2])])))
    assert any("warm" in line for line in summary_lines(sums([row(0, cost(2, 1, 1), [1, 2])])))


def test_without_ids_there_is_no_ideal() -> None:
    told = sums([row(0, cost(4, 0, 4), None)])
    assert told.ideal is None and told.ratio is None
    assert "ideal: not known" in "\n".join(summary_lines(told))


# ---------------------------------------------------------------- what is sent, and when


def test_what_overlapped_overlaps_and_what_had_ended_is_waited_for() -> None:
    rows = [
        captured("chat", {}, began_s=0, ended_s=10),
        captured("chat", {}, began_s=1, ended_s=2),
        captured("chat", {}, began_s=3, ended_s=4),
        captured("chat", {}, began_s=10, ended_s=11),
        captured("chat", {}, trace="b", began_s=0, ended_s=1),
    ]
    assert waits_for(rows, is_serial=False) == [[], [], [1], [0, 1, 2], [0, 1, 2, 3]]
    assert waits_for(rows, is_serial=True) == [[], [0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_a_body_keeps_all_but_model_length_and_temperature() -> None:
    given = {"model": "theirs", "max_completion_tokens": 9, "messages": [], "x": 1}
    body = request_body(captured("chat", given), "ours", 8)
    assert body["model"] == "ours" and body["x"] == 1
    assert body["max_tokens"] == body["max_completion_tokens"] == 8
    assert body["temperature"] == 0 and body["stream"]
    assert given["model"] == "theirs"
    assert request_body(captured("responses", {}), "m", 8)["max_output_tokens"] == 8


def test_a_trace_file_gives_its_generations_in_order(tmp_path: Path) -> None:
    times = {"t": 1.0, "t_end": 2.0}
    common = {"method": "POST", "headers": {"h": "1"}, "body": {}, **times}
    rows = [
        common | {"path": "/v1/messages", "query": "beta=true", "response": {"content": []}},
        common | {"path": "/v1/messages/count_tokens", "query": "", "response": None},
        common | {"path": "/v1/models", "query": "", "method": "GET", "response": None},
        common | {"path": "/v1/chat/completions", "query": "", "response": {"message": {}}},
    ]
    path = tmp_path / "some.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    found = load_trace(path)
    assert [(each.dialect, each.path) for each in found] == [
        ("messages", "/v1/messages?beta=true"),
        ("chat", "/v1/chat/completions"),
    ]
    assert found[0].trace == "some" and load_trace(path, limit=1) == found[:1]


CONVERSATIONS: dict[str, tuple[list[Any], list[Any]]] = {
    "chat": (
        [{"role": "assistant", "content": "theirs", "reasoning_content": "t"}],
        [{"role": "assistant", "content": "ours", "reasoning_content": "hm"}],
    ),
    "messages": (
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "theirs"},
                    {"type": "tool_use", "id": "c"},
                ],
            }
        ],
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "ours"},
                    {"type": "tool_use", "id": "c"},
                ],
            }
        ],
    ),
    "responses": (
        [
            {"type": "reasoning", "encrypted_content": "x"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "theirs"}]},
        ],
        [
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "ours"}]},
        ],
    ),
}


@pytest.mark.parametrize("dialect", CONVERSATIONS)
def test_live_puts_our_answer_where_theirs_was_and_only_there(dialect: str) -> None:
    name = "input" if dialect == "responses" else "messages"
    theirs, ours = CONVERSATIONS[dialect]
    user = {"role": "user", "content": "hi"}
    asked = captured(dialect, {name: [user]}, said="theirs")
    place = answer_key(asked)
    assert place == ("theirs", 0)
    again = json.loads(json.dumps([user, *theirs, user, *theirs]))
    body = with_live(dialect, {name: again}, {place: Spoken("ours", "hm")})
    assert body[name] == [user, *ours, user, *theirs]


def test_other_dialects_become_the_same_conversation_in_chat_shape() -> None:
    given = {
        "model": "m",
        "max_tokens": 8,
        "system": [{"type": "text", "text": "be brief"}],
        "tools": [{"name": "read", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
        ],
    }
    body = as_chat("messages", given)
    assert [message["role"] for message in body["messages"]] == ["system", "user", "tool"]
    assert body["tools"][0]["function"]["name"] == "read"
    assert body["max_tokens"] == 8 and body["stream"]
    with pytest.raises(RequestError):
        as_chat("messages", given | {"messages": []})


def test_calls_in_another_dialect_are_sent_with_arguments_as_text() -> None:
    call = {"type": "tool_use", "id": "1", "name": "read", "input": {"file": "é", "lines": 2}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "text"}
    turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = as_chat("messages", {"model": "m", "max_tokens": 8, "messages": turns})
    (sent,) = body["messages"][0]["tool_calls"]
    assert sent["function"] == {"name": "read", "arguments": '{"file": "é", "lines": 2}'}
    assert body["messages"][1]["role"] == "tool"


# ---------------------------------------------------------------- against a server


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer as the first message says; the stream of "long" has a line of a megabyte."""
    body = await request.json()
    wish = body["messages"][0]["content"]
    if wish == "refuse":
        return web.Response(status=400, text="no such thing")
    if wish == "die":
        return web.Response(status=503, text="busy")
    events = chat_events()
    if wish == "break":
        events = events[:3]
    if wish == "long":
        events.insert(2, {"choices": [{"delta": {"content": "x" * 2**20}}]})
    raw = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    headers = {"x-request-id": wish, "content-type": "text/event-stream"}
    return web.Response(body=raw + b"data: [DONE]\n\n", headers=headers)


async def tell_ids(request: web.Request) -> web.Response:
    if request.headers["authorization"] != "Bearer k":
        return web.Response(status=401)
    if request.match_info["id"] == "long":
        return web.Response(status=404)
    return web.json_response({"ids": [1, 2, 3]})


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "served"}]})


def replayed(*wishes: str) -> list[Row]:
    return together([captured("chat", body_of(wish)) for wish in wishes])


def body_of(wish: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": wish}]}


def together(*sessions: list[Captured]) -> list[Row]:
    async def run() -> list[Row]:
        app = web.Application()
        app.router.add_post("/v1/x", answer)
        app.router.add_get("/v1/cache/prompts/{id}", tell_ids)
        app.router.add_get("/v1/models", models)
        async with TestServer(app) as server:
            target = Target(f"http://127.0.0.1:{server.port}", key="k")
            rows, _ = await replay_together(sessions, target)
            return rows

    return asyncio.run(run())


@pytest.mark.process
def test_what_a_server_does_is_answered_refused_or_failed() -> None:
    rows = replayed("fine", "refuse", "die", "break", "long")
    assert [row.outcome.is_answered for row in rows] == [True, False, False, False, True]
    assert [row.outcome.is_refused for row in rows] == [False, True, False, False, False]
    assert [row.tokens for row in rows] == [TOLD, None, None, None, TOLD]
    assert "broke off" in rows[3].outcome.error
    assert [row.ids for row in rows] == [[1, 2, 3], None, None, [1, 2, 3], None]
    told = sums(rows)
    assert (told.refused, told.failed, told.ideal) == (1, 2, None)


@pytest.mark.process
def test_sessions_that_run_together_wait_for_themselves_alone_and_share_an_ideal() -> None:
    slow = [captured("chat", body_of("long"), trace="slow", began_s=n, ended_s=n) for n in range(3)]
    fast = [captured("chat", body_of("fine"), trace="fast", began_s=n, ended_s=n) for n in range(3)]
    rows = together(slow, fast)
    assert [row.number for row in rows] == list(range(6))
    assert [row.sent_s for row in rows] == sorted(row.sent_s for row in rows)
    assert {row.trace for row in rows[:2]} == {"slow", "fast"}, "the second begins at once"
    known = [row for row in rows if row.ids is not None]
    assert [row.trace for row in known] == ["fast"] * 3
    assert excesses(known) == [9, 11, 11], "of 12 prefilled: 3 had to be, then the last token"
