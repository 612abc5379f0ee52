"""Our events become numbered ones of Responses, and the same response whole."""

import asyncio
from typing import Any

from hearth.proxy.api.answer_frames import frames
from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.proxy.api.responses import responses_events, responses_request
from hearth.shared.errors import WorkerLost
from hearth.shared.wire_messages import Finished, Usage
from tests.helpers.clients.api_events import (
    KV_CACHE,
    LATE,
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

SUMMARY = {"effort": "medium", "summary": "auto"}
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]},
    {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}},
]


def events(*given: Given, **fields: Any) -> list[dict[str, Any]]:
    request = responses_request.parse({"model": "m", "input": "hi", "stream": True, **fields})
    rows = stream(request, responses_events.ResponseWriter, *given)
    assert [row["sequence_number"] for row in rows] == list(range(len(rows)))
    return rows


def kinds(rows: list[dict[str, Any]]) -> list[str]:
    return [row["type"].removeprefix("response.") for row in rows]


def whole(*given: Given, **fields: Any) -> dict[str, Any]:
    request = responses_request.parse({"model": "m", "input": "hi", **fields})
    return asyncio.run(responses_events.whole(AdmittedRequest(request, "m", Scripted(*given))))


def test_the_stream_is_in_order_and_ends_complete() -> None:
    rows = events(thought("a"), None, said("b"), said("c"), done())
    assert kinds(rows) == [
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
    assert final["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    assert final["output"][1]["content"][0]["text"] == "bc"


def test_a_silence_tells_the_prefill_and_not_again_what_was_asked() -> None:
    rows = events(None, said("a"), done(), tools=TOOLS, instructions="be good")
    assert kinds(rows)[:3] == ["created", "in_progress", "in_progress"]
    assert rows[2]["prefill"] == {"done_tokens": 7, "prompt_tokens": 10}
    assert (rows[2]["response"]["tools"], rows[2]["response"]["instructions"]) == ([], None)
    for row in (rows[0], rows[-1]):
        assert row["response"]["tools"] == TOOLS
        assert row["response"]["instructions"] == "be good"


def test_reasoning_is_told_as_a_summary_to_who_asks_for_one() -> None:
    rows = events(thought("a"), thought("b"), said("c"), done(), reasoning=SUMMARY)
    assert kinds(rows)[2:9] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert rows[8]["item"] == {
        "id": "rs_r_0",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "ab"}],
        "encrypted_content": SIGNATURE,
        "status": "completed",
    }
    plain = whole(thought("ab"), done())["output"][0]
    assert plain["content"] == [{"type": "reasoning_text", "text": "ab"}]
    assert (plain["summary"], plain["encrypted_content"]) == ([], SIGNATURE)


def test_a_function_call_is_an_item_with_the_workers_id() -> None:
    given = (said("a"), called("c1", "f", '{"x":'), more("1}"), done("tool_calls"))
    rows = events(*given, tools=TOOLS)
    assert kinds(rows)[-6:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert rows[-6]["item"] | {"status": "", "arguments": ""} == rows[-6]["item"] | {"status": ""}
    assert rows[-2]["item"] == {
        "id": "fc_r_1",
        "type": "function_call",
        "call_id": "c1",
        "name": "f",
        "arguments": '{"x":1}',
        "status": "completed",
    }
    assert rows[-1]["response"]["output"] == whole(*given, tools=TOOLS)["output"]


def test_a_namespaces_function_is_called_by_its_own_name() -> None:
    (item,) = whole(called("c", "ns__g", "{}"), done("tool_calls"), tools=TOOLS)["output"]
    assert (item["name"], item["namespace"]) == ("g", "ns")


def test_a_custom_tool_is_called_with_the_text_itself() -> None:
    text = '{"input": "*** Begin\\n+\\u00e9 \\"x\\""}'
    rows = events(called("c", "patch"), more(text[:9]), more(text[9:]), done(), tools=TOOLS)
    plain = '*** Begin\n+é "x"'
    assert kinds(rows)[2:-1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert (rows[3]["delta"], rows[4]["input"], rows[5]["item"]["input"]) == (plain,) * 3
    assert rows[5]["item"]["type"] == "custom_tool_call"
    other = whole(called("c", "patch", '{"patch": "x"}'), done(), tools=TOOLS)["output"][0]
    assert other["input"] == "x"  # a model's own name for the one argument


def test_a_search_for_tools_is_the_clients_to_make() -> None:
    given = (called("c", "tool_search", '{"query": "q"}'), done("tool_calls"))
    rows = events(*given, tools=TOOLS)
    assert kinds(rows)[2:-1] == ["output_item.added", "output_item.done"]
    assert rows[3]["item"] == {
        "id": "tsc_r_0",
        "type": "tool_search_call",
        "execution": "client",
        "call_id": "c",
        "arguments": {"query": "q"},
        "status": "completed",
    }


def test_a_call_that_is_cut_off_is_closed_with_nothing_that_a_client_could_run() -> None:
    for name, cut, field in (
        ("f", '{"x": "rm -rf /fo', "arguments"),
        ("patch", '{"input": "*** Beg', "input"),
        ("tool_search", '{"query": "q', "arguments"),
    ):
        rows = events(called("c", name, cut), done("length"), tools=TOOLS)
        assert kinds(rows)[-2:] == ["output_item.done", "incomplete"]
        (item,) = rows[-1]["response"]["output"]
        assert rows[-2]["item"] == item
        assert item["status"] == "incomplete"
        assert item[field] == {"arguments": cut if name == "f" else {}, "input": ""}[field]
    rows = events(called("c", "f", "{}"), done("length"), tools=TOOLS)
    assert kinds(rows)[-2:] == ["output_item.done", "incomplete"]  # cut behind it


def test_pieces_without_text_open_nothing() -> None:
    told = whole(thought(""), said(""), called("c", "f", "{}"), more(""), done("tool_calls"))
    assert [item["type"] for item in told["output"]] == ["function_call"]
    (empty,) = whole(done())["output"]
    assert empty["content"][0]["text"] == ""


def test_what_was_asked_is_told_back() -> None:
    shape = {"type": "json_object"}
    told = whole(
        done(),
        text={"format": shape, "verbosity": None},
        tool_choice="none",
        parallel_tool_calls=False,
        max_output_tokens=9,
        metadata={"a": "b"},
        reasoning=SUMMARY,
        store=False,
        prompt_cache_key="k",
        user="u",
        tools=TOOLS,
        temperature=0.5,
    )
    assert told["text"] == {"format": shape}
    assert (told["tool_choice"], told["parallel_tool_calls"]) == ("none", False)
    assert (told["max_output_tokens"], told["metadata"]) == (9, {"a": "b"})
    assert (told["reasoning"], told["store"]) == (SUMMARY, False)
    assert (told["prompt_cache_key"], told["user"], told["temperature"]) == ("k", "u", 0.5)
    plain = whole(done())
    assert plain["text"] == {"format": {"type": "text"}}
    assert (plain["tool_choice"], plain["store"], plain["tools"]) == ("auto", True, [])
    assert plain["reasoning"] == {"effort": None, "summary": None}


def test_a_response_tells_what_was_used_streamed_and_whole() -> None:
    streamed = events(LATE)[-1]["response"]["usage"]
    used = whole(LATE)["usage"]
    assert streamed == used
    assert used["input_tokens"] == 10
    assert used["input_tokens_details"] == {"cached_tokens": 8, "cache_write_tokens": 0}
    seen = responses_events.usage_fields(Usage(10, 8, 2, 3, image_tokens=5))
    assert seen["input_tokens_details"] == used["input_tokens_details"] | {"image_tokens": 5}
    assert used["total_tokens"] == 13
    assert used["kv_cache"] == KV_CACHE


def test_a_length_limit_ends_incomplete() -> None:
    rows = events(said("a"), Finished("r", "length", None, Usage(1, 0, 1, 1)))
    assert rows[-1]["type"] == "response.incomplete"
    assert rows[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_a_stream_that_breaks_off_ends_failed_and_keeps_what_there_was() -> None:
    rows = events(said("a"), WorkerLost("gone"))
    assert rows[-1]["type"] == "response.failed"
    told = rows[-1]["response"]
    assert told["error"] == {"code": "worker_unavailable", "message": "gone"}
    assert told["output"][0]["content"][0]["text"] == "a"
    assert told["output"][0]["status"] == "incomplete"
    assert kinds(rows)[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    assert rows[-2]["item"] == told["output"][0]


def test_a_whole_end_is_noted_before_it_is_told_and_a_broken_one_never() -> None:
    ended: list[dict[str, Any]] = []

    async def read(*given: Given) -> None:
        request = responses_request.parse({"input": "hi"})
        ticket = AdmittedRequest(request, "m", Scripted(*given), note_end=ended.append)
        counts = [len(ended) async for _ in frames(ticket, responses_events.ResponseWriter(ticket))]
        assert counts[0] == 0 and counts[-1] == len(ended)

    asyncio.run(read(said("a"), WorkerLost("gone")))
    assert not ended
    asyncio.run(read(said("a"), done()))
    assert [row["status"] for row in ended] == ["completed"]
