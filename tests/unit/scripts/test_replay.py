"""A replay reads what streams tell in each dialect, and waits for what had ended."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.commands.replay.ideal_cache import ideal_cached
from hearth.commands.replay.traces import waits_for
from hearth.commands.stream_client import COUNT_MAX, READERS, Reading, SseReader, Tokens, tokens_of
from tests.helpers.clients.captured_events import KV, captured, chat_events

TOLD = Tokens(prompt=100, cached=90, prefilled=12, completion=8, source="ram")


# ---------------------------------------------------------------- the ideal


def test_a_refused_prompt_is_nobodys_prefix() -> None:
    assert ideal_cached([None, [1, 2], None, [1, 2, 3]]) == [None, 0, None, 2]


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


KEYS = ("choices", "delta", "usage", "content", "error", "type", "message", "response", "text")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(KEYS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=8,
)


@given(
    st.sampled_from(sorted(READERS)),
    st.dictionaries(
        st.sampled_from(
            (
                *("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"),
                "prompt_tokens_details",
            )
        ),
        JSON,
        min_size=1,
    ),
    st.dictionaries(st.sampled_from(("prefilled", "source")), JSON),
)
def test_any_usage_counts_or_is_none(
    dialect: str, usage: dict[str, Any], kv_cache: dict[str, Any]
) -> None:
    tokens = tokens_of(dialect, Reading(usage=usage, kv_cache=kv_cache))
    if tokens is not None:
        counts = (tokens.prompt, tokens.cached, tokens.prefilled, tokens.completion)
        assert all(type(each) is int and 0 <= each <= 3 * COUNT_MAX for each in counts)
        assert isinstance(tokens.source, str)


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
