"""Our events as chat completions: deltas that a client can add up, and the same answer whole."""

import asyncio
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage

from hearth.proxy.api import chat_completions, server_sent_events as sse
from hearth.proxy.api.chat_completions import ChatChunk, WholeChoice
from hearth.proxy.api.multi_choice_stream import MergedChoices
from hearth.shared.wire_messages import Delta
from tests.helpers.proxy.virtual_time import run_in_virtual_time
from tests.helpers.worker_processes.fixed_answers import (
    Step,
    arguments,
    call,
    end,
    listed,
    logprob,
    said,
    thought,
    ticket,
)

TOOLS = [
    {"type": "function", "function": {"name": "f"}},
    {"type": "custom", "custom": {"name": "patch"}},
]
BODY = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "stream": True}
LEGACY = {**BODY, "tools": [], "functions": [{"name": "f"}]}


def pieces(*scripts: Sequence[Step], body: dict[str, Any] = BODY) -> list[ChatChunk]:
    made = ticket(chat_completions.parse(body | {"n": len(scripts)}), *scripts)
    return run_in_virtual_time(listed(chat_completions.chunks(made, MergedChoices(made))))


def deltas(*steps: Step, body: dict[str, Any] = BODY) -> list[Any]:
    """Return the deltas between the first one and the end."""
    first, *middle, last = pieces(steps, body=body)
    assert first.delta == {"role": "assistant", "content": ""}
    assert last.delta == {}
    assert last.finish_reason is not None
    return [piece.delta for piece in middle]


def whole(*steps: Step, body: dict[str, Any] = BODY) -> WholeChoice:
    made = ticket(chat_completions.parse(body | {"stream": False}), steps)
    (found,) = run_in_virtual_time(chat_completions.whole_choices(made, MergedChoices(made)))
    return found


def chunk(piece: ChatChunk) -> dict[str, Any]:
    choice = {"index": piece.index, "delta": piece.delta}
    if piece.finish_reason:
        choice["finish_reason"] = piece.finish_reason
    return {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


def accumulated(rows: Sequence[ChatChunk]) -> Any:
    """Return what OpenAI's own client makes of the chunks."""
    state: Any = ChatCompletionStreamState()
    for piece in rows:
        exact = chat_completions.exact_chunk(chunk(piece), 5)
        state.handle_chunk(ChatCompletionChunk.model_validate(exact))
    return state.get_final_completion()


def test_channels_become_the_fields_of_a_delta() -> None:
    assert deltas(thought("hm"), said("hi"), end()) == [
        {"reasoning_content": "hm"},
        {"content": "hi"},
    ]


def test_a_call_begins_with_its_id_and_name_and_goes_on_with_its_arguments() -> None:
    one, two, three, four = deltas(
        call("c1", "f"), arguments('{"a":'), arguments("1}"), call("c2", "f", "{}"), end()
    )
    first = {"index": 0, "id": "c1", "type": "function"}
    assert one == {"tool_calls": [first | {"function": {"name": "f", "arguments": ""}}]}
    assert two == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}
    assert three == {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}
    assert four["tool_calls"][0]["index"] == 1
    assert four["tool_calls"][0]["function"]["arguments"] == "{}"


def test_text_after_a_call_is_still_told() -> None:
    assert deltas(call("c1", "f", "{}"), said("done"), end())[-1] == {"content": "done"}


def test_a_custom_tools_text_is_told_whole_when_its_call_ends() -> None:
    steps = [call("c1", "patch"), arguments('{"input": "a\\'), arguments('nb"}')]
    custom = {"type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    for following in ([], [call("c2", "f", "{}")]):
        first, *rest = deltas(*steps, *following, end("tool_calls"))
        assert first == {"tool_calls": [{"index": 0, "id": "c1", **custom}]}
        assert [row["tool_calls"][0]["index"] for row in rest] == [1] * len(following)
    found = whole(*steps, end("tool_calls")).message()
    assert found["tool_calls"] == [{"id": "c1", **custom}]


def test_a_custom_tools_text_is_told_whatever_the_model_named_it() -> None:
    steps = [call("c1", "patch", '{"patch": "a"}'), end("tool_calls")]
    assert whole(*steps).calls[0]["custom"] == {"name": "patch", "input": "a"}


def test_a_custom_tools_text_that_was_cut_off_is_empty_rather_than_half() -> None:
    steps = [call("c1", "patch", '{"input": "a'), end("length")]
    assert whole(*steps).calls[0]["custom"] == {"name": "patch", "input": ""}
    assert whole(*steps).finish_reason == "length"


def test_a_request_with_functions_is_answered_with_a_function_call() -> None:
    steps = [call("c1", "f", '{"a"'), arguments(":1}"), end("tool_calls")]
    assert deltas(*steps, body=LEGACY) == [
        {"function_call": {"name": "f", "arguments": '{"a"'}},
        {"function_call": {"arguments": ":1}"}},
    ]
    found = whole(*steps, body=LEGACY)
    assert found.finish_reason == "function_call"
    wanted = {"name": "f", "arguments": '{"a":1}'}
    assert found.message() == {"role": "assistant", "content": None, "function_call": wanted}


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
def test_the_finish_reason_is_the_workers(reason: str) -> None:
    rows = pieces([call("c1", "f", "{}"), end(reason)])
    assert [piece.finish_reason for piece in rows if piece.finish_reason] == [reason]


def test_content_is_null_where_the_model_only_calls_and_empty_where_it_says_nothing() -> None:
    assert whole(call("c1", "f", "{}"), end()).message()["content"] is None
    assert whole(thought("hm"), end()).message()["content"] == ""
    assert whole(end()).message() == {"role": "assistant", "content": ""}


def test_logprobs_go_with_the_delta_of_their_tokens_or_alone() -> None:
    row, more = logprob("a"), logprob("b")
    steps = [said("a", logprobs=[row]), said("", logprobs=[more]), end()]
    told = [(piece.delta, piece.logprobs) for piece in pieces(steps)[1:-1]]
    assert told == [({"content": "a"}, [row]), ({}, [more])]
    assert whole(*steps).logprobs == [row, more]


def test_choices_are_told_by_their_index_each_with_its_role() -> None:
    rows = pieces([said("a"), end()], [said("b"), end("length")])
    assert [(row.index, row.delta.get("role")) for row in rows[:2]] == [
        (0, "assistant"),
        (1, "assistant"),
    ]
    ends = {row.index: row.finish_reason for row in rows if row.finish_reason}
    assert ends == {0: "stop", 1: "length"}


def test_a_silence_is_an_empty_delta_with_the_prefills_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.05)
    rows = pieces([0.13, said("a"), 0.08, end()])
    pings = [row for row in rows if row.delta == {} and row.finish_reason is None]
    assert len(pings) == 3
    progress = {"done_tokens": 5, "prompt_tokens": 12}
    assert [row.progress for row in pings] == [progress] * 3


def test_a_long_text_for_a_custom_tool_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.05)
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time(), time=time.time)
    monkeypatch.setattr(chat_completions, "time", clock)
    steps: list[Step] = [call("c1", "patch", '{"input": "')]
    for _ in range(10):
        steps += [0.02, arguments("x")]
    rows = pieces([*steps, arguments('"}'), end()])
    assert sum(row.delta == {} and row.finish_reason is None for row in rows) >= 2


def test_a_chunk_becomes_exact() -> None:
    progress = {"done_tokens": 1, "prompt_tokens": 2}
    made: dict[str, Any] = {
        "id": "c",
        "created": 7,
        "choices": [{"index": 0, "delta": {"provider_specific_fields": {"prefill": progress}}}],
    }
    assert chat_completions.exact_chunk(made, 5) == {
        "id": "c",
        "created": 5,
        "choices": [{"index": 0, "delta": {}, "finish_reason": None}],
        "prefill": progress,
    }
    usage = {"choices": [{"index": 0, "delta": {}}], "usage": {"prompt_tokens": 1}}
    assert chat_completions.exact_chunk(usage, 5)["choices"] == []
    more = {"index": 0, "type": "function", "function": {"arguments": "x"}}
    typed = {"choices": [{"index": 0, "delta": {"tool_calls": [more]}}]}
    (choice,) = chat_completions.exact_chunk(typed, 5)["choices"]
    assert choice["delta"]["tool_calls"] == [{"index": 0, "function": {"arguments": "x"}}]


def test_a_whole_answer_becomes_exact() -> None:
    made = {"choices": [{"message": {"role": "assistant", "tool_calls": []}}]}
    (choice,) = chat_completions.exact_whole(made)["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "tool_calls": [],
        "content": None,
        "refusal": None,
    }
    assert choice["logprobs"] is None


TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6)
SAID = st.one_of(TEXTS.map(said), TEXTS.map(thought), TEXTS.map(arguments))
CALLS = st.sampled_from(["f", "g"]).map(lambda name: call("c", name))
STEPS = st.lists(st.one_of(SAID, CALLS), max_size=12)


@settings(max_examples=200)
@given(STEPS)
def test_openais_client_adds_a_stream_up_to_the_whole_answer(steps: list[Delta]) -> None:
    started = False
    rows: list[Step] = []
    for step in steps:
        started = started or step.call is not None
        if step.channel != "tool_call" or started:
            rows.append(step)
    told = whole(*rows, end("stop")).message()
    built = accumulated(pieces([*rows, end("stop")])).choices[0].message
    wanted = ChatCompletionMessage.model_validate(told)
    assert (built.content or None) == (wanted.content or None)
    assert getattr(built, "reasoning_content", None) == told.get("reasoning_content")
    calls = [(row.id, row.function.name, row.function.arguments) for row in built.tool_calls or ()]
    assert calls == [
        (row["id"], row["function"]["name"], row["function"]["arguments"])
        for row in told.get("tool_calls", ())
    ]


def test_openais_client_parses_calls_as_they_arrive() -> None:
    steps = [call("c1", "f"), *map(arguments, json.dumps({"a": [1, "é"]})), end("tool_calls")]
    final = accumulated(pieces(steps))
    (made,) = final.choices[0].message.tool_calls
    assert json.loads(made.function.arguments) == {"a": [1, "é"]}
    assert final.choices[0].finish_reason == "tool_calls"
