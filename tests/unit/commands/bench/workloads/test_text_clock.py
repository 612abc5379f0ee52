"""Arrivals of text and counts of tokens are read from any stream of chat completions."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import aiohttp
import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.workloads import timed_stream
from hearth.commands.bench.workloads.timed_stream import (
    TOGETHER_S,
    TimedAnswer,
    TimedClient,
)
from hearth.commands.stream_client import Outcome, Reading, read_chat, tokens_of

SENT_S = 100.0


def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> str:
    told = {"prompt_tokens": prompt, "completion_tokens": completion}
    return json.dumps({"choices": [], "usage": told})


def made(events: list[tuple[float, str]], error: str = "") -> TimedAnswer:
    """Return the answer of which `events` came, each so many seconds after the sending."""

    async def send(*_: Any, on_event: Callable[[str, float], None]) -> Outcome:
        reading = Reading(is_complete=not error)
        for after_s, data in events:
            on_event(data, SENT_S + after_s)
            if data != "[DONE]":
                read_chat(reading, json.loads(data))
        return Outcome(200, tokens_of("chat", reading), None, 1.0, error, reading)

    with pytest.MonkeyPatch.context() as patcher:
        patcher.setattr(timed_stream, "send", send)
        patcher.setattr(timed_stream.time, "perf_counter", lambda: SENT_S)
        client = TimedClient(cast(aiohttp.ClientSession, None), {})
        return asyncio.run(client.ask("q", 1, {}))


@given(st.lists(st.floats(0.0, 0.01), min_size=1, max_size=60), st.integers(1, 500))
def test_arrivals_are_apart_in_order_and_never_tokens(waits: list[float], tokens: int) -> None:
    at, events = 0.0, []
    for wait in waits:
        at += wait
        events.append((at, chunk({"content": "a"})))
    answer = made([*events, (at + 1, chunk({}, "length")), (at + 2, usage(7, tokens))])
    assert (answer.prompt, answer.completion) == (7, tokens), "as the server counts, not by events"
    assert answer.text == "a" * len(waits)
    assert answer.ttft_s == pytest.approx(waits[0]) and answer.ended_s == SENT_S + (at + 2)
    assert answer.arrivals_s[0] == SENT_S + events[0][0]
    assert set(answer.arrivals_s) <= {SENT_S + after for after, _ in events}
    assert all(gap >= TOGETHER_S for gap in answer.gaps_s)
    assert answer.gaps_s == [later - earlier for earlier, later in pairwise(answer.arrivals_s)]


def test_two_events_at_once_are_one_arrival() -> None:
    times = (1.0, 1.0, 1.04, 1.04001)
    events = [(after, chunk({"content": "a"})) for after in times]
    answer = made([*events, (2.0, chunk({}, "stop")), (2.0, usage(1, 4))])
    assert answer.gaps_s == [pytest.approx(0.04)], "as of one event with two tokens"
