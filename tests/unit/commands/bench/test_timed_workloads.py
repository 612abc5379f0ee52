"""Timed workloads measure right: arrivals, gaps beside a long prompt, decoding, validity."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import aiohttp
import jsonschema
import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.workloads import timed_stream
from hearth.commands.bench.workloads.beside_long import gap_values, gaps_within
from hearth.commands.bench.workloads.decode_cost import Asking, Decoded, decode_values
from hearth.commands.bench.workloads.structured import SCHEMA, obeys
from hearth.commands.bench.workloads.timed_stream import TOGETHER_S, TimedAnswer, TimedClient
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


times = st.lists(st.integers(0, 60), min_size=2, max_size=30, unique=True).map(sorted)


@given(times, st.integers(0, 60), st.integers(1, 20))
def test_the_gaps_of_a_span_are_those_that_share_a_moment_with_it(
    arrivals: list[int], began: int, length: int
) -> None:
    found = gaps_within(arrivals, began, began + length)
    moments = [began + part + 0.5 for part in range(length)]
    expected = [
        later - earlier
        for earlier, later in pairwise(arrivals)
        if any(earlier < moment < later for moment in moments)
    ]
    assert found == expected


def test_a_server_that_stops_its_streams_is_seen() -> None:
    before = [0.1 * number for number in range(11)]  # until 1.0
    stalled = [*before, 9.0, 9.1]
    values = gap_values([stalled, stalled, stalled], sent_s=1.0, first_s=8.9)
    assert values["gap_p50_s"] == values["gap_p99_s"] == pytest.approx(8.0)
    assert values["gap_over_alone"] == pytest.approx(80.0)


def test_streams_that_lose_nothing_have_the_gaps_of_before() -> None:
    steady = [0.1 * number for number in range(100)]
    values = gap_values([steady] * 3, sent_s=2.0, first_s=7.0)
    assert values["gap_over_alone"] == pytest.approx(1.0)
    assert values["gap_p50_s"] == pytest.approx(0.1)


def answer(completion: int, step_s: float = 0.01, first_s: float = 0.5) -> TimedAnswer:
    arrivals = tuple(first_s + step_s * number for number in range(completion))
    return TimedAnswer(0.0, first_s + step_s * completion, arrivals, 9, completion, "", "")


def asking(count: int, completion: int, wall_s: float, forwards: float | None) -> Asking:
    taken = {"cpu_s": 1.0, "memory_bytes": 5.0}
    return Asking([answer(completion) for _ in range(count)], wall_s, forwards, taken)


@given(
    st.integers(1, 16), st.integers(16, 300), st.integers(1, 9), st.floats(0.001, 9),
    st.floats(1e-3, 1.0),
)  # fmt: skip
def test_what_is_before_the_first_token_counts_nowhere(
    count: int, tokens: int, prompt_forwards: int, prompt_s: float, step_s: float
) -> None:
    """All streams in one batch: a forward of each step, whatever their prompts took."""
    again = asking(count, 1, prompt_s, prompt_forwards)
    steps = tokens - 1
    whole = asking(count, tokens, prompt_s + steps * step_s, prompt_forwards + steps)
    values = decode_values(again, whole)
    assert values["forwards_per_token"] == pytest.approx(1 / count)
    assert values["tokens_s"] == pytest.approx(count / step_s, rel=1e-6)


def test_of_too_few_tokens_nothing_is_said() -> None:
    assert decode_values(asking(1, 1, 1.0, 3), asking(1, 4, 1.1, 6)) == {}
    quick = decode_values(asking(1, 1, 1.0, 3), asking(1, 64, 0.9, 66))
    assert quick == {"forwards_per_token": 1.0}, "no speed of no time"
    assert decode_values(asking(1, 1, 1.0, None), asking(1, 64, 2.0, None)) == {"tokens_s": 63.0}


def test_a_failure_leaves_no_figures_of_decoding() -> None:
    whole = asking(2, 64, 1.5, 67)
    broken = replace(whole, answers=[whole.answers[0], replace(whole.answers[1], error="500 no")])
    found = Decoded(asking(2, 1, 1, 4), asking(2, 1, 0.5, 4), broken)
    values = found.values()
    assert (values["failed"], values["requests"]) == (1, 5) and found.errors() == ("500 no",)
    assert not {"tokens_s", "gap_p50_s", "forwards_per_token"} & set(values)


words = st.sampled_from(["low", "high", "read", "edit", "cache", "proxy", "other", ""])
leaves = words | st.booleans() | st.none() | st.integers(0, 2)
steps = st.fixed_dictionaries(
    {"action": st.sampled_from(["read", "edit"]), "area": words, "is_risky": leaves},
    optional={"more": leaves},
)
plans = st.fixed_dictionaries(
    {"severity": words, "is_blocking": leaves},
    optional={"steps": st.lists(steps, max_size=4) | leaves, "more": leaves},
)


@given(plans | leaves | st.lists(leaves, max_size=3))
def test_it_obeys_where_jsonschema_says_so(value: Any) -> None:
    assert obeys(value, SCHEMA) is jsonschema.Draft202012Validator(SCHEMA).is_valid(value)
