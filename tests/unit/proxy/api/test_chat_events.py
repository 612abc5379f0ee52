"""Our events as chat completions: deltas that a client can add up, and the same answer whole."""

import asyncio
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from hearth.proxy.api import (
    answer_frames,
    chat_completions,
    chat_completions_events,
    server_sent_events as sse,
)
from hearth.proxy.api.chat_completions_events import logprob_fields, usage_fields
from hearth.proxy.api.multi_choice_stream import AdmittedRequest
from hearth.shared.errors import WorkerLost
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
USAGE = {"stream_options": {"include_usage": True}}
SILENT = {"role": "assistant", "content": "", "refusal": None}
SAYS_NOTHING = {"index": 0, "delta": {}, "finish_reason": None}


def answered(*scripts: Sequence[Step], body: dict[str, Any] = BODY) -> AdmittedRequest:
    return ticket(chat_completions.parse(body | {"n": len(scripts)}), *scripts)


def frames(made: AdmittedRequest) -> list[bytes]:
    writer = chat_completions_events.ChatWriter(made)
    return run_in_virtual_time(listed(answer_frames.frames(made, writer)))


def chunks(*scripts: Sequence[Step], body: dict[str, Any] = BODY) -> list[Any]:
    """Return the chunks of a stream that ended well."""
    *rows, last = frames(answered(*scripts, body=body))
    assert last == sse.DONE
    return [json.loads(row.removeprefix(b"data: ")) for row in rows]


def choices(*scripts: Sequence[Step], body: dict[str, Any] = BODY) -> list[Any]:
    """Return the one choice of each chunk."""
    return [row["choices"][0] for row in chunks(*scripts, body=body)]


def deltas(*steps: Step, body: dict[str, Any] = BODY) -> list[Any]:
    """Return the deltas between the first one and those of the end."""
    first, *middle, told, last = choices(steps, body=body)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert set(told["delta"].pop("provider_specific_fields")) == {"kv_cache", "speculation"}
    assert told["delta"] == {"content": ""}
    assert last["delta"] == {}
    assert last["finish_reason"] is not None
    assert all(row["finish_reason"] is None for row in (first, *middle, told))
    return [row["delta"] for row in middle]


def whole(*scripts: Sequence[Step], body: dict[str, Any] = BODY) -> Any:
    made = answered(*scripts, body=body | {"stream": False})
    return run_in_virtual_time(chat_completions_events.whole(made))


def message(*steps: Step, body: dict[str, Any] = BODY) -> Any:
    return whole(steps, body=body)["choices"][0]["message"]


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
    found = message(*steps, end("tool_calls"))
    assert found["tool_calls"] == [{"id": "c1", **custom}]


def test_a_custom_tools_text_is_told_whatever_the_model_named_it() -> None:
    steps = [call("c1", "patch", '{"patch": "a"}'), end("tool_calls")]
    assert message(*steps)["tool_calls"][0]["custom"] == {"name": "patch", "input": "a"}


def test_a_custom_tools_text_that_was_cut_off_is_empty_rather_than_half() -> None:
    steps = [call("c1", "patch", '{"input": "a'), end("length")]
    (choice,) = whole(steps)["choices"]
    assert choice["message"]["tool_calls"][0]["custom"] == {"name": "patch", "input": ""}
    assert choice["finish_reason"] == "length"


def test_a_request_with_functions_is_answered_with_a_function_call() -> None:
    steps = [call("c1", "f", '{"a"'), arguments(":1}"), end("tool_calls")]
    assert deltas(*steps, body=LEGACY) == [
        {"function_call": {"name": "f", "arguments": '{"a"'}},
        {"function_call": {"arguments": ":1}"}},
    ]
    (found,) = whole(steps, body=LEGACY)["choices"]
    assert found["finish_reason"] == "function_call"
    wanted = {"name": "f", "arguments": '{"a":1}'}
    assert found["message"] == {**SILENT, "content": None, "function_call": wanted}


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
def test_the_finish_reason_is_the_workers(reason: str) -> None:
    steps = [call("c1", "f", "{}"), end(reason)]
    told = [row["finish_reason"] for row in choices(steps)]
    assert told == [None] * (len(told) - 1) + [reason]
    assert whole(steps)["choices"][0]["finish_reason"] == reason


def test_content_is_null_where_the_model_only_calls_and_empty_where_it_says_nothing() -> None:
    assert message(call("c1", "f", "{}"), end())["content"] is None
    assert message(thought("hm"), end())["content"] == ""
    assert message(end()) == SILENT


def test_logprobs_go_with_the_delta_of_their_tokens_or_alone() -> None:
    row, more = logprob("a"), logprob("b")
    steps = [said("a", logprobs=[row]), said("", logprobs=[more]), end()]
    told = [(row["delta"], row["logprobs"]) for row in choices(steps) if "logprobs" in row]
    first, second = logprob_fields([row]), logprob_fields([more])
    assert told == [({"content": "a"}, first), ({}, second)]
    asked = BODY | {"logprobs": True}
    assert whole(steps, body=asked)["choices"][0]["logprobs"] == logprob_fields([row, more])
    assert whole(steps)["choices"][0]["logprobs"] is None, "nobody asked for them"


def test_choices_are_told_by_their_index_each_with_its_role() -> None:
    rows = choices([said("a"), end()], [0.1, said("b"), end("length")])
    told = [(row["index"], row["delta"].get("role")) for row in rows[:2]]
    assert told == [(0, "assistant"), (1, "assistant")]
    ends = [(row["index"], row["finish_reason"]) for row in rows if row["finish_reason"]]
    assert ends == [(0, "stop"), (1, "length")]
    others = [row for row in rows if row["index"] == 1]
    assert rows.index(others[1]) > rows.index({"index": 0, "delta": {}, "finish_reason": "stop"})


def test_a_silence_is_an_empty_delta_with_the_prefills_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.05)
    rows = chunks([0.13, said("a"), 0.08, end()])
    pings = [row for row in rows if row["choices"] == [SAYS_NOTHING]]
    assert [row["prefill"] for row in pings] == [{"done_tokens": 5, "prompt_tokens": 12}] * 3
    assert sum("prefill" in row for row in rows) == 3


def test_a_long_text_for_a_custom_tool_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.05)
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time(), time=time.time)
    monkeypatch.setattr(answer_frames, "time", clock)
    steps: list[Step] = [call("c1", "patch", '{"input": "')]
    for _ in range(10):
        steps += [0.02, arguments("x")]
    rows = choices([*steps, arguments('"}'), end()])
    assert rows.count(SAYS_NOTHING) >= 2


def test_a_chunk_has_the_fields_that_openais_have_and_those_of_its_stream() -> None:
    rows = chunks([said("a"), end()], body=BODY | USAGE)
    shell = {"id": "chatcmpl-abc", "object": "chat.completion.chunk", "model": "m"}
    for row in rows:
        assert row == row | shell | {"created": rows[0]["created"]}
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
    assert rows[1] == {**shell, "created": rows[0]["created"], "choices": [choice]}
    assert rows[-2]["choices"] == [{"index": 0, "delta": {}, "finish_reason": "stop"}]


def test_usage_comes_last_where_it_is_wanted_and_nowhere_else() -> None:
    usage = end().usage
    *others, last = chunks([said("a"), end()], [end()], body=BODY | USAGE)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * usage.completion_tokens
    assert last["usage"]["prompt_tokens"] == usage.prompt_tokens, "of one prompt"
    assert set(last["usage"]) == set(usage_fields(usage))
    assert not any("usage" in row for row in others)
    assert not any("usage" in row for row in chunks([said("a"), end()]))


def test_the_last_delta_of_all_tells_the_cache_whether_usage_is_wanted_or_not() -> None:
    rows = choices([said("a"), end()], [0.1, said("b"), end()])
    told = [row for row in rows if "provider_specific_fields" in row["delta"]]
    assert told == [rows[-2]], "once, when all of them have ended"
    assert rows[-2]["index"] == rows[-1]["index"] == 1
    (fields,) = [row["delta"]["provider_specific_fields"] for row in told]
    assert fields["kv_cache"]["source"] == "ram"


def test_a_whole_answer_has_the_nulls_that_openais_have() -> None:
    answer = whole([said("a"), end()], [said("b"), end("length")])
    assert (answer["id"], answer["object"], answer["model"]) == (
        "chatcmpl-abc",
        "chat.completion",
        "m",
    )
    assert answer["choices"][1] == {
        "index": 1,
        "message": SILENT | {"content": "b"},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert answer["usage"]["completion_tokens"] == 14
    ChatCompletion.model_validate(answer)


def test_a_stream_that_breaks_ends_with_the_error_and_is_not_called_done() -> None:
    made = answered([said("a"), WorkerLost("gone")])
    *_, before, last = frames(made)
    assert b'"content":"a"' in before
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["code"], error["type"]) == ("worker_unavailable", "server_error")


def test_a_whole_answer_that_breaks_is_an_error() -> None:
    with pytest.raises(WorkerLost):
        whole([said("a"), WorkerLost("gone")])
