"""Anthropic bodies become our request, and our events become theirs in the right order."""

import asyncio
from typing import Any

import orjson
import pytest

from proxy.dialects import messages
from proxy.request import Ticket
from shared.errors import RequestError, WorkerLost
from shared.wire import Delta, Finished, Usage


def body(*rows: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 10, "messages": list(rows), **fields}


def parsed(*rows: Any, **fields: Any) -> list[Any]:
    return messages.parse(body(*rows, **fields)).prompt.messages


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def refused(*rows: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        messages.parse(body(*rows, **fields))
    return caught.value


HI = {"role": "user", "content": "hi"}


def test_system_comes_first_and_a_later_system_message_stays_in_place() -> None:
    rows = parsed(HI, {"role": "system", "content": "b"}, HI, system=[text("a"), text("c")])
    assert [row["role"] for row in rows] == ["system", "user", "system", "user"]
    assert rows[0]["content"] == "a\nc"


def test_telemetry_goes_from_the_start_of_the_system_prompt_and_from_nowhere_else() -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.329.649; cc_entrypoint=sdk-cli;"
    for system in ([text(line), text("a")], [text(f"{line}\na")], f"{line}\na"):
        assert parsed(HI, system=system)[0] == {"role": "system", "content": "a"}
    assert [row["role"] for row in parsed(HI, system=[text(line)])] == ["user"]
    for system in ([text("a"), text(line)], [text(""), text(line)], [text(f"{line} x=1;")]):
        assert parsed(HI, system=system)[0]["content"].splitlines()[-1].startswith(line)
    document = {"type": "document", "source": {"type": "text", "data": line}}
    assert parsed(HI, system=[document])[0]["content"] == line
    rows = parsed(user(text(line)), {"role": "system", "content": line})
    assert [row["content"] for row in rows] == [line, line]


def test_a_result_names_the_tools_that_it_loads() -> None:
    loads = [{"type": "tool_reference", "tool_name": name} for name in ("CronList", "WebFetch")]
    result = {"type": "tool_result", "tool_use_id": "t", "content": loads}
    assert parsed(user(result))[0] == {
        "role": "tool",
        "tool_call_id": "t",
        "content": "",
        "tool_references": ["CronList", "WebFetch"],
    }
    mixed = result | {"content": [text("a"), *loads[:1], text("b")], "is_error": True}
    row = parsed(user(mixed))[0]
    assert (row["content"], row["tool_references"]) == ("Error: a\nb", ["CronList"])
    assert "tool_references" not in parsed(user(result | {"content": [text("a")]}))[0]
    bad = refused(user(result | {"content": [{"type": "tool_reference"}]}))
    assert bad.param == "messages[0].content[0].content[0].tool_name"
    assert refused(user(*loads)).param == "messages[0].content[0].type"


def test_tools_that_are_loaded_later_stay_out_of_the_head() -> None:
    tools = [
        {"name": name, "input_schema": {"type": "object"}, "defer_loading": is_late}
        for name, is_late in (("Agent", None), ("CronList", True), ("Edit", False))
    ]
    prompt = messages.parse(body(HI, tools=tools)).prompt
    assert [tool["function"]["name"] for tool in prompt.tools] == ["Agent", "Edit"]
    (late,) = prompt.deferred
    parameters = {"type": "object"}
    assert late == {
        "type": "function",
        "function": {"name": "CronList", "parameters": parameters},
    }
    hidden = messages.parse(body(HI, tools=tools, tool_choice={"type": "none"})).prompt
    assert hidden.tools == hidden.deferred == []
    assert refused(HI, tools=[tools[0] | {"defer_loading": "yes"}]).param == "defer_loading"


def test_tool_results_and_texts_keep_their_order() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("r")]}
    rows = parsed(HI, user(text("before"), result, text("after")))
    assert [row["role"] for row in rows] == ["user", "user", "tool", "user"]
    assert rows[2] == {"role": "tool", "tool_call_id": "t1", "content": "r"}


def test_a_tool_error_is_told_to_the_model() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "boom", "is_error": True}
    assert parsed(user(result))[0]["content"] == "Error: boom"


def test_an_assistant_turn_keeps_thinking_text_and_calls() -> None:
    turn = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "", "signature": ""},
            text("ok"),
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
    }
    assert parsed(HI, turn)[1] == {
        "role": "assistant",
        "content": "ok",
        "reasoning_content": "hm\n",
        "signatures": ["s", "x"],
        "tool_calls": [
            {"id": "t", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
        ],
    }


@pytest.mark.parametrize(("kind", "flag"), [("enabled", True), ("adaptive", True)])
def test_thinking_is_a_template_switch(kind: str, flag: bool) -> None:
    request = messages.parse(body(HI, thinking={"type": kind, "budget_tokens": 2048}))
    assert request.prompt.template_kwargs == {"enable_thinking": flag}
    off = messages.parse(body(HI, thinking={"type": "disabled"}))
    assert off.prompt.template_kwargs == {"enable_thinking": False}


def test_tools_take_their_schema_and_hosted_ones_are_counted() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "cache_control": {}}
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    request = messages.parse(body(HI, tools=[tool, hosted]))
    assert request.prompt.tools[0]["function"] == {"name": "f", "parameters": {"type": "object"}}
    assert request.dropped_tools == ("web_search_20250305",)
    bad = refused(HI, tools=[{"name": "f", "input_schema": "x"}])
    assert bad.param == "tools[0].input_schema"


@pytest.mark.parametrize(
    ("rows", "fields", "param"),
    [
        ([], {}, "messages"),
        ([{"role": "tool", "content": "x"}], {}, "messages[0].role"),
        ([user({"type": "image", "source": {}})], {}, "messages[0].content[0]"),
        ([user({"type": "what"})], {}, "messages[0].content[0].type"),
        ([user(5)], {}, "messages[0].content[0]"),
        ([HI], {"max_tokens": 0}, "max_tokens"),
        ([HI], {"stop_sequences": [""]}, "stop_sequences"),
        ([HI], {"thinking": {"type": "maybe"}}, "thinking.type"),
        ([HI], {"tool_choice": {"type": "any"}}, "tool_choice"),
        ([HI], {"system": 5}, "system"),
        ([HI], {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
    ],
)
def test_what_is_wrong_is_named(rows: list[Any], fields: Any, param: str) -> None:
    error = refused(*rows, **fields)
    assert (error.status, error.param) == (400, param)


class Scripted:
    """An answer that gives what it was made from; None stands for silence."""

    request_id, prompt_tokens, cached_tokens = "r", 10, 4

    def __init__(self, *events: Delta | Finished | RequestError | None) -> None:
        self._events = list(events)
        self.is_closed = False

    async def next_event(self, wait_s: float | None = None) -> Delta | Finished | None:
        event = self._events.pop(0)
        if isinstance(event, RequestError):
            raise event
        return event

    def close(self) -> None:
        self.is_closed = True


def stream(*given: Any) -> list[dict[str, Any]]:
    answer = Scripted(*given)
    ticket = Ticket(messages.parse(body(HI, stream=True)), "m", answer)

    async def collect() -> list[bytes]:
        return [frame async for frame in messages.events(ticket)]

    rows = []
    for frame in asyncio.run(collect()):
        name, data = frame.decode().strip().split("\n")
        rows.append(orjson.loads(data.removeprefix("data: ")))
        assert name == f"event: {rows[-1]['type']}"
    assert answer.is_closed
    return rows


DONE = Finished("r", "stop", None, Usage(10, 4, 6, 3))
LATE = Finished("r", "stop", None, Usage(10, 8, 2, 3, source="ram"))  # more was kept by its turn
LATE_FIELDS = {
    "input_tokens": 2,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 8,
    "output_tokens": 3,
    "kv_cache": {
        "cache_hit": True,
        "prefix_length": 8,
        "prefilled": 2,
        "source": "ram",
        "divergence": None,
    },
}


def test_the_stream_opens_grows_and_closes_each_block() -> None:
    rows = stream(Delta("r", 0, "reasoning", "a"), None, Delta("r", 1, "content", "b"), DONE)
    assert [row["type"] for row in rows if row["type"] != "ping"] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert sum(row["type"] == "ping" for row in rows) == 2  # after the first start, and in silence
    assert rows[0]["message"]["usage"]["cache_read_input_tokens"] == 4
    assert rows[0]["message"]["usage"]["input_tokens"] == 6
    assert rows[-2]["usage"]["output_tokens"] == 3


def test_a_stream_opens_with_what_was_kept_and_ends_with_what_was_used() -> None:
    rows = stream(Delta("r", 0, "content", "a"), LATE)
    assert rows[0]["message"]["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 0,
    }
    assert rows[-2]["usage"] == LATE_FIELDS


def test_a_whole_message_tells_what_was_used() -> None:
    answer = Scripted(Delta("r", 0, "content", "a"), LATE)
    told = asyncio.run(messages.whole(Ticket(messages.parse(body(HI)), "m", answer)))
    assert told["usage"] == LATE_FIELDS
    assert told["content"] == [{"type": "text", "text": "a"}]


def test_a_cold_prompt_reads_nothing_from_the_cache() -> None:
    cold = messages.usage_fields(Usage(10, 0, 10, 3))
    assert (cold["input_tokens"], cold["cache_read_input_tokens"]) == (10, 0)
    assert not cold["kv_cache"]["cache_hit"]
    assert cold["kv_cache"]["source"] == "none"


def test_an_empty_answer_still_has_a_block() -> None:
    kinds = [row["type"] for row in stream(DONE)]
    assert kinds[1:3] == ["content_block_start", "content_block_stop"]


def test_a_stop_string_is_named() -> None:
    rows = stream(Finished("r", "stop", "END", Usage(1, 0, 1, 1)))
    assert rows[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_a_stream_that_breaks_off_ends_in_an_error_event() -> None:
    rows = stream(Delta("r", 0, "content", "a"), WorkerLost("gone"))
    assert rows[-1] == {"type": "error", "error": {"type": "api_error", "message": "gone"}}
