"""Our events become Anthropic's, in the right order, and the same message whole."""

import asyncio
import json
from typing import Any

import orjson
import pytest

from hearth.proxy.api import server_sent_events as sse
from hearth.proxy.api.messages import messages_events, messages_request
from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.shared.errors import WorkerLost
from hearth.shared.wire_messages import Delta, Finished, Usage
from tests.helpers.clients.api_events import (
    KV_CACHE,
    LATE,
    NO_DRAFTS,
    SIGNATURE,
    Given,
    Scripted,
    called,
    done,
    more,
    said,
    stream,
    thought,
)

HI = [{"role": "user", "content": "hi"}]
PREFILL = {"done_tokens": 7, "prompt_tokens": 10}
LATE_FIELDS = {
    "input_tokens": 2,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 8,
    "output_tokens": 3,
    "output_tokens_details": {"thinking_tokens": 0},
    "kv_cache": KV_CACHE,
    "speculation": NO_DRAFTS,
}


def events(*given: Given, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of the stream, its pings left out but for the first."""
    signature = fields.pop("signature", SIGNATURE)
    request = messages_request.parse({"messages": HI, "stream": True, **fields})
    return stream(request, messages_events.MessageWriter, *given, signature=signature)


def content_events(*given: Given, **fields: Any) -> list[dict[str, Any]]:
    """Return the events about content."""
    return [row for row in events(*given, **fields) if row["type"].startswith("content_block")]


def whole(*given: Given, **fields: Any) -> dict[str, Any]:
    request = messages_request.parse({"messages": HI, **fields})
    told = asyncio.run(messages_events.whole(AdmittedRequest(request, "m", Scripted(*given))))
    read: dict[str, Any] = json.loads(orjson.dumps(told))
    return read


def test_the_stream_opens_grows_and_closes_each_block() -> None:
    rows = events(thought("a"), None, said("b"), done())
    assert [row["type"] for row in rows if row["type"] != "ping"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert rows[0]["message"]["usage"]["cache_read_input_tokens"] == 4
    assert rows[0]["message"]["usage"]["input_tokens"] == 6
    assert rows[-2]["usage"]["output_tokens"] == 3
    assert rows[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 1}


def test_a_ping_follows_the_start_and_each_silence_and_tells_the_prefill() -> None:
    rows = events(None, said("a"), None, done())
    kinds = [row["type"] for row in rows]
    assert kinds[:3] == ["message_start", "ping", "ping"]
    assert kinds.count("ping") == 3
    assert all(row["prefill"] == PREFILL for row in rows if row["type"] == "ping")


def test_thinking_is_signed_before_its_block_ends() -> None:
    rows = content_events(thought("a"), thought("b"), said("c"), thought("d"), done())
    first = [row.get("delta") for row in rows if row["index"] == 0]
    assert first == [
        None,
        {"type": "thinking_delta", "thinking": "a"},
        {"type": "thinking_delta", "thinking": "b"},
        {"type": "signature_delta", "signature": SIGNATURE},
        None,
    ]
    signed = [row["index"] for row in rows if row.get("delta", {}).get("type") == "signature_delta"]
    assert signed == [0, 2]
    told = whole(thought("a"), said("c"), done())["content"]
    assert told[0] == {"type": "thinking", "thinking": "a", "signature": SIGNATURE}
    unsigned = content_events(thought("a"), done(), signature="")
    assert "signature_delta" not in [row.get("delta", {}).get("type") for row in unsigned]


def test_thinking_that_the_client_does_not_want_is_only_signed() -> None:
    hidden = {"type": "adaptive", "display": "omitted"}
    rows = content_events(thought("a"), thought("b"), said("c"), done(), thinking=hidden)
    assert [row.get("delta") for row in rows if row["index"] == 0] == [
        None,
        {"type": "signature_delta", "signature": SIGNATURE},
        None,
    ]
    told = whole(thought("a"), said("c"), done(), thinking=hidden)["content"]
    assert told[0] == {"type": "thinking", "thinking": "", "signature": SIGNATURE}
    for display in ("summarized", "updates"):
        shown = whole(thought("a"), done(), thinking={"type": "adaptive", "display": display})
        assert shown["content"][0]["thinking"] == "a"


def test_hidden_thinking_does_not_leave_the_stream_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.0)
    hidden = {"type": "adaptive", "display": "omitted"}
    rows = events(*(thought("a") for _ in range(5)), done(), thinking=hidden)
    assert sum(row["type"] == "ping" for row in rows) == 5  # the start's, and one a delta but one


def test_calls_are_blocks_with_the_ids_as_they_are() -> None:
    given = (
        said("a"),
        called("c1", "f", '{"x"'),
        more(': [1, "]"]}'),
        called("c2", "g"),
        more("{}"),
    )
    rows = content_events(*given, done("tool_calls"))
    starts = [row["content_block"] for row in rows if row["type"] == "content_block_start"]
    assert starts[1:] == [
        {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
        {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
    ]
    pieces = [row["delta"] for row in rows if row["type"] == "content_block_delta"][1:]
    assert {piece["type"] for piece in pieces} == {"input_json_delta"}
    assert [piece["partial_json"] for piece in pieces] == ['{"x"', ': [1, "]"]}', "{}"]
    told = whole(*given, done("tool_calls"))
    assert [block.get("input") for block in told["content"]] == [None, {"x": [1, "]"]}, {}]
    assert told["stop_reason"] == "tool_use"


def test_text_after_a_call_is_a_block_of_its_own() -> None:
    told = whole(called("c", "f", "{}"), said("a"), said("b"), done("tool_calls"))
    assert [block["type"] for block in told["content"]] == ["tool_use", "text"]
    assert told["content"][1]["text"] == "ab"


def test_pieces_without_text_open_nothing() -> None:
    assert whole(thought(""), said(""), done())["content"] == [{"type": "text", "text": ""}]
    told = whole(thought("a"), said(""), called("c", "f", "{}"), more(""), done("tool_calls"))
    assert [block["type"] for block in told["content"]] == ["thinking", "tool_use"]


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        ("", {}),
        ('{"a', {}),
        ('{"a": "x, y", "b": 12', {"a": "x, y"}),
        ('{"a": "\\"", "b": {"c": 1, "d": 2', {"a": '"'}),
        ('{"a": [1, 2], "b": "rm -rf /foo', {"a": [1, 2]}),
        ('{"a": 1, "b": 2}', {"a": 1, "b": 2}),
        ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
    ],
)
def test_of_a_call_that_was_cut_off_the_whole_pairs_stay(cut: str, kept: dict[str, Any]) -> None:
    told = whole(called("c", "f", cut), done("length"))
    assert told["content"][0]["input"] == kept
    assert told["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("finished", "reason", "sequence"),
    [
        (done(), "end_turn", None),
        (done("length"), "max_tokens", None),
        (done("tool_calls"), "tool_use", None),
        (done("stop", "END"), "stop_sequence", "END"),
    ],
)
def test_why_it_ended_is_told(finished: Finished, reason: str, sequence: str | None) -> None:
    expected = {"stop_reason": reason, "stop_sequence": sequence}
    assert events(finished)[-2]["delta"] == expected
    told = whole(finished)
    assert {name: told[name] for name in expected} == expected


def test_a_stream_opens_with_what_was_kept_and_ends_with_what_was_used() -> None:
    rows = events(said("a"), LATE)
    assert rows[0]["message"]["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 0,
    }
    assert rows[-2]["usage"] == LATE_FIELDS


def test_a_whole_message_tells_what_was_used() -> None:
    told = whole(said("a"), LATE)
    assert told["usage"] == LATE_FIELDS
    assert told["content"] == [{"type": "text", "text": "a"}]


def test_a_cold_prompt_reads_nothing_from_the_cache() -> None:
    cold = messages_events.usage_fields(Usage(10, 0, 10, 3), is_marked=False)
    assert (cold["input_tokens"], cold["cache_read_input_tokens"]) == (10, 0)
    assert not cold["kv_cache"]["cache_hit"]
    assert cold["kv_cache"]["source"] == "none"


def test_an_empty_answer_still_has_a_block() -> None:
    assert [row["type"] for row in content_events(done())] == [
        "content_block_start",
        "content_block_stop",
    ]


def test_a_stream_that_breaks_off_ends_in_an_error_event() -> None:
    rows = events(Delta("r", 0, "content", "a"), WorkerLost("gone"))
    assert rows[-1] == {"type": "error", "error": {"type": "api_error", "message": "gone"}}


@pytest.mark.parametrize(
    "marked",
    [
        {"cache_control": {"type": "ephemeral"}},
        {"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
                    ],
                }
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [
                                {
                                    "type": "text",
                                    "text": "r",
                                    "cache_control": {"type": "ephemeral"},
                                }
                            ],
                        }
                    ],
                }
            ]
        },
    ],
    ids=["body", "system", "tools", "message", "result"],
)
def test_what_a_client_marked_is_counted_as_created_where_it_was_not_read(
    marked: dict[str, Any],
) -> None:
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    told = [whole(said("a"), LATE, **marked)["usage"]]
    rows = events(said("a"), LATE, **marked)
    told += [row["usage"] for row in rows if row["type"] == "message_delta"]
    assert [[usage[name] for name in names] for usage in told] == [[0, 2, 8], [0, 2, 8]]
