"""Responses bodies become our request, and our events become numbered ones."""

import asyncio
from typing import Any

import orjson
import pytest

from proxy.dialects import responses, responses_events
from proxy.request import Ticket
from shared.errors import RequestError, WorkerLost
from shared.wire import Delta, Finished, Usage
from tests.unit.test_dialect_messages import LATE, LATE_FIELDS, Scripted


def parsed(given: Any, **fields: Any) -> list[Any]:
    return responses.parse({"model": "m", "input": given, **fields}).prompt.messages


def refused(given: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed(given, **fields)
    return caught.value


def message(role: str, words: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": words}]}


def test_a_string_is_a_user_message_behind_the_instructions() -> None:
    assert parsed("hi", instructions="be good") == [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "hi"},
    ]


def test_one_turn_of_reasoning_text_and_calls_is_one_message() -> None:
    rows = parsed(
        [
            message("developer", "d"),
            message("user", "u"),
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]},
            message("assistant", "a"),
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "patch"},
            {"type": "function_call_output", "call_id": "c1", "output": "r1"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "r2"}],
            },
        ]
    )
    assert [row["role"] for row in rows] == ["system", "user", "assistant", "tool", "tool"]
    turn = rows[2]
    assert (turn["content"], turn["reasoning_content"]) == ("a", "why")
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [
        {"x": 1},
        {"input": "patch"},
    ]
    assert rows[4] == {"role": "tool", "tool_call_id": "c2", "content": "r2"}


def test_reasoning_before_a_call_belongs_to_the_call() -> None:
    rows = parsed(
        [
            {"role": "user", "content": "u"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""},
        ]
    )
    assert rows[1]["reasoning_content"] == "t"
    assert rows[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_reasoning_between_a_text_and_a_call_keeps_its_place() -> None:
    rows = parsed(
        [
            message("assistant", "first"),
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "then"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ]
    )
    assert [row.get("reasoning_content") for row in rows] == [None, "then"]
    assert "tool_calls" in rows[1]


def encrypted(sealed: str, *summary: str) -> dict[str, Any]:
    rows = [{"type": "summary_text", "text": words} for words in summary]
    return {"type": "reasoning", "summary": rows, "content": None, "encrypted_content": sealed}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "r"}


def test_encrypted_reasoning_names_the_turn_that_follows_it() -> None:
    rows = parsed(
        [
            *(
                message("user", "u"),
                encrypted("e1", "why"),
                message("assistant", "a"),
                CALL,
                RESULT,
            ),
            *(encrypted("e2"), CALL, RESULT),
            *(encrypted("e3"), encrypted(""), message("assistant", "b")),
        ]
    )
    turns = [row for row in rows if row["role"] == "assistant"]
    assert [row["signatures"] for row in turns] == [["e1"], ["e2"], ["e3"]]
    assert [row.get("reasoning_content") for row in turns] == ["why", None, None]
    assert ["tool_calls" in row for row in turns] == [True, True, False]


def test_encrypted_reasoning_within_a_turn_leaves_it_one() -> None:
    (turn,) = parsed([encrypted("e1"), message("assistant", "a"), encrypted("e2"), CALL])
    assert turn["signatures"] == ["e1", "e2"]
    assert (turn["content"], len(turn["tool_calls"])) == ("a", 1)


def test_encrypted_reasoning_that_nothing_follows_adds_no_turn() -> None:
    rows = parsed(
        [message("user", "u"), encrypted("e"), message("user", "v"), message("assistant", "a")]
    )
    assert [row["role"] for row in rows] == ["user", "user", "assistant"]
    assert "signatures" not in rows[2]
    cut = parsed([message("user", "u"), encrypted("e", "why")])
    assert cut[1]["signatures"] == ["e"]
    bad = {"type": "reasoning", "encrypted_content": 5}
    assert refused([bad]).param == "input[0].encrypted_content"


def test_a_stored_conversation_is_refused_with_what_to_do() -> None:
    error = refused("hi", previous_response_id="resp_1")
    assert error.param == "previous_response_id"
    assert "Send the whole conversation" in str(error)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (None, "input"),
        ([], "input"),
        ("", "input"),
        ([5], "input[0]"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0]"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output"),
    ],
)
def test_what_is_wrong_is_named(given: Any, param: str) -> None:
    assert refused(given).param == param


def test_tools_are_flat_and_hosted_ones_are_counted() -> None:
    body = {
        "model": "m",
        "input": "hi",
        "tools": [
            {"type": "function", "name": "f", "parameters": {}, "strict": False},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
            {"type": "function", "name": "late", "defer_loading": True},
            {"type": "web_search"},
        ],
    }
    request = responses.parse(body)
    assert [tool["function"]["name"] for tool in request.prompt.tools] == ["f", "patch"]
    assert [tool["function"]["name"] for tool in request.prompt.deferred] == ["late"]
    assert request.dropped_tools == ("web_search",)
    hidden = responses.parse(body | {"tool_choice": "none"}).prompt
    assert hidden.tools == hidden.deferred == []


def stream(*given: Any) -> list[dict[str, Any]]:
    request = responses.parse({"model": "m", "input": "hi", "stream": True})
    ticket = Ticket(request, "m", Scripted(*given))

    async def collect() -> list[bytes]:
        return [frame async for frame in responses_events.events(ticket)]

    frames = asyncio.run(collect())
    rows = [orjson.loads(frame.split(b"data: ")[1]) for frame in frames]
    assert [row["sequence_number"] for row in rows] == list(range(len(rows)))
    return rows


def test_the_stream_is_in_order_and_ends_complete() -> None:
    rows = stream(
        Delta("r", 0, "reasoning", "a"),
        None,
        Delta("r", 1, "content", "b"),
        Delta("r", 2, "content", "c"),
        Finished("r", "stop", None, Usage(10, 4, 6, 3, 1)),
    )
    assert [row["type"].removeprefix("response.") for row in rows] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "in_progress",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    final = rows[-1]["response"]
    assert final["usage"]["input_tokens_details"] == {"cached_tokens": 4}
    assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    assert final["output"][1]["content"][0]["text"] == "bc"


def test_a_response_tells_what_was_used_streamed_and_whole() -> None:
    streamed = stream(LATE)[-1]["response"]["usage"]
    request = responses.parse({"model": "m", "input": "hi"})
    whole = asyncio.run(responses_events.whole(Ticket(request, "m", Scripted(LATE))))["usage"]
    assert streamed == whole
    assert whole["input_tokens"] == 10
    assert whole["input_tokens_details"] == {"cached_tokens": 8}
    assert whole["total_tokens"] == 13
    assert whole["kv_cache"] == LATE_FIELDS["kv_cache"]


def test_a_length_limit_ends_incomplete() -> None:
    rows = stream(Delta("r", 0, "content", "a"), Finished("r", "length", None, Usage(1, 0, 1, 1)))
    assert rows[-1]["type"] == "response.incomplete"
    assert rows[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_stream_that_breaks_off_ends_failed_and_keeps_what_there_was() -> None:
    rows = stream(Delta("r", 0, "content", "a"), WorkerLost("gone"))
    assert rows[-1]["type"] == "response.failed"
    told = rows[-1]["response"]
    assert told["error"] == {"code": "worker_unavailable", "message": "gone"}
    assert told["output"][0]["content"][0]["text"] == "a"
