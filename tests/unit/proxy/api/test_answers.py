"""Checks how each dialect tells an answer, as a stream and whole; its cases are in tests/data/api.

tests/property/api holds, for any answer, that what a client adds a stream up to is the whole one.
"""

from typing import Any, Final

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from hearth.proxy.api import answer_frames
from hearth.proxy.api.answer_frames import logprob_entries
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.api.ollama import events as ollama_events, parse as ollama_parse
from hearth.shared.errors import WorkerLost
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import TokenLogprob
from tests.helpers.cases import cases
from tests.helpers.clients.api_events import (
    called,
    done,
    events_of,
    frames_of,
    given,
    more,
    said,
    thought,
    whole_of,
)
from tests.helpers.proxy.read_bodies import read

LEFT_OUT: Final = {
    *("created", "created_at", "completed_at", "total_duration", "load_duration"),
    *("prompt_eval_duration", "eval_duration"),
} | {"usage", "kv_cache", "speculation", "sequence_number", "object", "model"}
OF_RESPONSES: Final = ("status", "output", "error", "incomplete_details")  # the rest is an echo


def told(value: Any) -> Any:
    """Return an answer or its events without times, usage, and what each of them repeats."""
    if isinstance(value, list):
        return [told(each) for each in value]
    if not isinstance(value, dict):
        return value
    names = OF_RESPONSES if value.get("object") == "response" else value.keys() - LEFT_OUT
    return {name: told(each) for name, each in value.items() if name in names}


def usages_in(value: Any) -> list[Any]:
    """Return each usage in an answer or its events; Ollama's stands in the answer itself."""
    if isinstance(value, list):
        return [found for each in value for found in usages_in(each)]
    if not isinstance(value, dict):
        return []
    if "done" in value:
        names = ("prompt_eval_count", "eval_count", "kv_cache", "speculation", "warnings")
        return [{n: value[n] for n in names if n in value}] if value["done"] else []
    own = [value["usage"]] if value.get("usage") else []
    return own + [found for each in value.values() for found in usages_in(each)]


def of_each_dialect(table: str) -> list[Any]:
    return [
        pytest.param(dialect, *row.values, id=f"{dialect}: {row.id}")
        for dialect in DIALECTS
        for row in cases(f"api/{dialect}_answers.yaml", table)
    ]


@pytest.mark.parametrize(("dialect", "case"), of_each_dialect("answers"))
def test_an_answer_is_told_in_its_dialect(dialect: str, case: dict[str, Any]) -> None:
    request, rows = read(dialect, **case.get("body", {})), [given(step) for step in case["steps"]]
    if "stream" in case:
        assert told(events_of(request, rows)) == case["stream"]
    if "whole" in case:
        assert told(whole_of(request, rows)) == case["whole"]


@pytest.mark.parametrize(("dialect", "case"), of_each_dialect("usage"))
def test_usage_tells_of_the_prompt_the_cache_and_drafts(dialect: str, case: dict[str, Any]) -> None:
    request, rows = read(dialect, **case.get("body", {})), [given(step) for step in case["steps"]]
    assert usages_in(events_of(request, rows)) == case["stream"]
    assert usages_in(whole_of(request, rows)) == case["whole"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_whole_answer_that_breaks_is_an_error(dialect: str) -> None:
    with pytest.raises(WorkerLost, match="gone"):
        whole_of(read(dialect), [said("a"), WorkerLost("gone")])


SHELLS: Final[dict[str, dict[str, Any]]] = {
    "chat": {"object": "chat.completion.chunk", "model": "m"},
    "completions": {"object": "text_completion", "model": "m"},
    "ollama_chat": {"model": "M:latest"},  # as it was asked for
    "ollama_generate": {"model": "M:latest"},
}


@pytest.mark.parametrize("dialect", SHELLS)
def test_each_event_has_the_model_and_the_time_of_its_stream(dialect: str) -> None:
    rows = events_of(read(dialect, model="M:latest"), [said("a"), done()])
    events = [row for row in rows if row != "[DONE]"]
    assert all(row == row | SHELLS[dialect] for row in events)
    assert dialect.startswith("ollama") or len({row["created"] for row in events}) == 1


def test_usage_is_streamed_only_where_it_is_wanted() -> None:
    for dialect in ("chat", "completions"):
        assert usages_in(events_of(read(dialect), [said("a"), done()])) == []


def test_whole_answers_are_what_openais_types_declare() -> None:
    ChatCompletion.model_validate(whole_of(read("chat"), [said("a"), done()]))
    Completion.model_validate(whole_of(read("completions"), [said("a"), done()]))


@pytest.mark.parametrize(
    ("dialect", "body", "rows"),
    [
        (
            "messages",
            {"thinking": {"type": "adaptive", "display": "omitted"}},
            [thought("a")] * 5,
        ),
        (
            "chat",
            {"tools": [{"type": "custom", "custom": {"name": "patch"}}]},
            [called("c1", "patch", '{"input": "'), *[more("x")] * 5],
        ),
    ],
)
def test_what_is_written_and_not_told_is_no_silence(
    dialect: str, body: dict[str, Any], rows: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_frames, "PING_S", 0.0)
    told_rows = events_of(read(dialect, **body), [*rows, done()])
    assert sum("prefill" in row for row in told_rows) >= 4


def test_thinking_without_a_signature_is_not_signed() -> None:
    request = read("messages")
    rows = frames_of(request, DIALECTS["messages"].writer, [thought("a"), done()], signature="")
    assert b"signature_delta" not in b"".join(rows)


def test_a_log_probability_has_the_bytes_of_half_a_character() -> None:
    (row,) = logprob_entries([TokenLogprob(1, "\ufffd", b"\xe2", -0.5, [])])
    assert row["bytes"] == [0xE2]


# ---------------------------------------------------------------- Responses


def test_events_of_responses_are_numbered() -> None:
    rows = events_of(read("responses"), [thought("a"), None, said("b"), done()])
    assert [row["sequence_number"] for row in rows] == list(range(len(rows)))


def test_what_was_asked_is_told_back_and_not_again_in_a_silence() -> None:
    asked = {
        "text": {"format": {"type": "json_object"}},
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "prompt_cache_key": "k",
        "user": "u",
        "instructions": "be good",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "temperature": 0.5,
    }
    response = whole_of(read("responses", **asked), [done()])
    assert response == response | asked
    rows = events_of(read("responses", **asked), [None, said("a"), done()])
    for row in (rows[0], rows[-1]):
        assert row["response"] == row["response"] | asked
    assert (rows[2]["response"]["tools"], rows[2]["response"]["instructions"]) == ([], None)
    plain = whole_of(read("responses"), [done()])
    assert plain["text"] == {"format": {"type": "text"}}
    assert (plain["tool_choice"], plain["store"], plain["tools"]) == ("auto", True, [])
    assert plain["reasoning"] == {"effort": None, "summary": None}


def test_a_whole_end_is_noted_and_a_broken_one_never() -> None:
    ended: list[dict[str, Any]] = []
    writer = DIALECTS["responses"].writer
    for end in (WorkerLost("gone"), done()):
        frames_of(read("responses"), writer, [said("a"), end], store_response=ended.append)
    assert [row["status"] for row in ended] == ["completed"]


# ---------------------------------------------------------------- Ollama


def test_durations_add_up_to_all_the_time_since_the_request_came() -> None:
    end = done(ttft_ms=300, finish_ms=800, queue_ms=100)
    row = whole_of(read("ollama_chat"), [said("a"), end], received_at=awake_s() - 2.0)
    assert (row["prompt_eval_duration"], row["eval_duration"]) == (200_000_000, 500_000_000)
    assert 2_000_000_000 <= row["total_duration"] < 60_000_000_000
    parts = ("load_duration", "prompt_eval_duration", "eval_duration")
    assert sum(row[name] for name in parts) == row["total_duration"]
    row = whole_of(read("ollama_chat"), [said("a"), done()])
    assert row["prompt_eval_duration"] == row["eval_duration"] == 1_000_000, "clients divide by it"


def test_a_conversation_too_long_for_a_context_has_none() -> None:
    long = read("ollama_generate", prompt="x" * ollama_parse.CONTEXT_BYTES_MAX)
    assert whole_of(long, [said("yes"), done()])["context"] == []


def test_a_request_that_asks_nothing_is_answered_whole() -> None:
    row = ollama_events.empty_answer("ollama_chat", "m", "load")
    assert row["message"] == {"role": "assistant", "content": ""}
    assert row["done"] and row["done_reason"] == "load"
    assert ollama_events.empty_answer("ollama_generate", "m", "unload")["response"] == ""
