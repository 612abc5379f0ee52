"""Arrivals of text and counts of tokens are read from any stream of chat completions."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.workloads.timed_stream import (
    ERROR_CHARS_MAX,
    TOGETHER_S,
    TextClock,
    TimedAnswer,
    errors_of_answers,
    has_text,
    told_error,
)

SENT_S = 100.0


def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> str:
    told = {"prompt_tokens": prompt, "completion_tokens": completion}
    return json.dumps({"choices": [], "usage": told})


def made(events: list[tuple[float, str]], error: str = "") -> TimedAnswer:
    """Return the answer of which `events` came, each so many seconds after the sending."""
    clock = TextClock()
    for after_s, data in events:
        clock.take(data, SENT_S + after_s)
    return clock.answer(SENT_S, error)


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


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"reasoning_content": "a"},
        {"reasoning": "a"},
        {"refusal": "a"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_each_kind_of_text_is_text(delta: dict[str, Any]) -> None:
    assert has_text(json.loads(chunk(delta)))


@pytest.mark.parametrize("delta", [{}, {"role": "assistant"}, {"content": ""}, {"content": None}])
def test_what_a_server_says_to_keep_a_client_is_no_text(delta: dict[str, Any]) -> None:
    assert not has_text(json.loads(chunk(delta)))
    answer = made([(1.0, chunk(delta)), (3.0, chunk({}, "length")), (3.0, usage(1, 1))])
    assert answer.arrivals_s == () and answer.ttft_s == pytest.approx(3.0), "its end then"


def test_one_token_may_have_no_text_but_is_an_answer() -> None:
    answer = made([(1.0, chunk({}, "length")), (1.0, usage(9, 1)), (1.0, "[DONE]")])
    assert answer.error == "" and answer.ttft_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([(1.0, chunk({"content": "a"}))], "the stream broke off"),
        ([(1.0, chunk({"content": "a"}, "stop"))], "the stream told no usage"),
        ([(1.0, "no json")], "an event is no chunk of a chat completion"),
        ([(1.0, "[1]")], "an event is no chunk of a chat completion"),
        ([(1.0, json.dumps({"error": {"message": "no memory"}}))], "no memory"),
    ],
)
def test_what_a_server_does_wrong_is_an_error(events: list[tuple[float, str]], error: str) -> None:
    answer = made(events)
    assert (answer.error, answer.ttft_s, answer.is_full(0)) == (error, None, False)


@given(st.text(max_size=400))
def test_an_error_is_short_and_names_no_path(text: str) -> None:
    said = text + " /home/someone/model.safetensors"
    for told in (said, json.dumps({"error": {"message": said}}), json.dumps({"detail": said})):
        found = told_error(told)
        assert len(found) <= ERROR_CHARS_MAX and "/" not in found


def test_the_message_of_an_error_is_found() -> None:
    assert told_error('{"error": {"message": "too  long", "input": "secret"}}') == "too long"
    assert told_error('{"detail": "no /root/x here"}') == "no (path) here"
    assert told_error('"no memory"') == "no memory"
    assert told_error("plain") == "plain" and told_error("") == ""


@pytest.mark.parametrize(("asked", "is_full"), [(64, True), (70, True), (72, False), (128, False)])
def test_an_answer_is_full_also_where_a_server_counts_a_token_less(
    asked: int, is_full: bool
) -> None:
    answer = made([(1.0, chunk({"content": "a"}, "length")), (1.0, usage(1, 64))])
    assert answer.is_full(asked) is is_full


def test_an_error_is_told_once() -> None:
    good = made([(1.0, chunk({"content": "a"}, "stop")), (1.0, usage(1, 1))])
    bad = made([], "500 no")
    assert errors_of_answers([good, bad, bad]) == ("500 no",)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("choices", "delta", "usage", "content", "error")), inner)
    ),
    max_leaves=8,
)


@given(st.lists(JSON | st.fixed_dictionaries({"choices": JSON, "usage": JSON}), max_size=4))
def test_any_events_are_an_answer_or_an_error(events: list[Any]) -> None:
    answer = made([(1.0, json.dumps(event)) for event in events])
    assert isinstance(answer.text, str) and 0 <= answer.completion <= 10**9
    assert isinstance(answer.error, str)


@pytest.mark.parametrize("data", ["5", "[]", '{"choices": [1]}', "[" * 100_000, '{"usage": [1]}'])
def test_what_is_no_chunk_is_told_without_its_text(data: str) -> None:
    assert made([(1.0, data)]).error == "an event is no chunk of a chat completion"


@pytest.mark.parametrize("told", [10**400, 1e300, -1, "many", [1], 0.5, {"a": 1}])
def test_a_usage_that_counts_nothing_is_none(told: object) -> None:
    data = json.dumps({"choices": [], "usage": {"prompt_tokens": told, "completion_tokens": 1}})
    answer = made([(1.0, chunk({"content": "a"}, "stop")), (2.0, data)])
    assert (answer.error, answer.prompt) == ("the stream told no usage", 0)


@pytest.mark.parametrize("text", ["ab::" * 250_000, "[" * 1_000_000, '{"error": [' * 90_000])
def test_an_error_of_any_length_is_told_at_once(text: str) -> None:
    """A pattern took seconds for 80,000 characters, and four times as long for twice as many."""
    assert len(told_error(text)) <= ERROR_CHARS_MAX
