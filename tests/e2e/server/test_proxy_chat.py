"""Chat completions over a real server, read by OpenAI's client: calls, choices, raw prompts."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.servers.fake_server import FakeServer

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
OTHER = {"name": "g", "parameters": {"type": "object"}}
TOOLS: list[Any] = [{"type": "function", "function": row} for row in (FUNCTION, OTHER)]
CUSTOM: list[Any] = [{"type": "custom", "custom": {"name": "patch"}}]
USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer(PROXY_MODEL_ID="some-model") as running:
        yield running


@pytest.fixture(scope="module")
def gpt(fake: FakeServer) -> Iterator[openai.OpenAI]:
    with fake.openai() as client:
        yield client


def asked(script: str, **fields: Any) -> Any:
    return {"model": "gpt-x", "messages": [{"role": "user", "content": script}], **fields}


def rows_of(fake: FakeServer, body: Any, path: str = "/v1/chat/completions") -> list[Any]:
    """Return the chunks of a stream as they are on the wire."""
    answer = httpx.post(fake.url + path, json=body | {"stream": True}, timeout=30)
    events = answer.text.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.mark.parametrize("count", [1, 2])
def test_calls_are_streamed_as_they_are_answered_whole(gpt: openai.OpenAI, count: int) -> None:
    body = asked(f"n=1 reason=1 calls={count}", tools=TOOLS)
    with gpt.chat.completions.stream(**body) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    whole = gpt.chat.completions.create(**body)
    for answer in (final, whole):
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "tok0 "
        assert choice.message.reasoning_content == "think0 "  # type: ignore[union-attr]
        calls: Any = choice.message.tool_calls
        assert [(row.id, row.function.name) for row in calls] == [("call0", "f"), ("call1", "g")][
            :count
        ]
        assert [json.loads(row.function.arguments) for row in calls] == [
            {"input": f"a\n{index}"} for index in range(count)
        ]
    assert kinds.count("tool_calls.function.arguments.done") == count


def test_an_answer_that_only_calls_has_no_content(fake: FakeServer) -> None:
    body = asked("n=0 calls=1", tools=TOOLS)
    answer = httpx.post(f"{fake.url}/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["type"] == "function"


def test_a_custom_tool_is_called_with_text(gpt: openai.OpenAI, fake: FakeServer) -> None:
    body = asked("n=0 calls=1", tools=CUSTOM)
    whole: Any = gpt.chat.completions.create(**body)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", "a\n0")
    deltas = [row["choices"][0]["delta"] for row in rows_of(fake, body)]
    (streamed,) = [row["tool_calls"] for row in deltas if "tool_calls" in row]
    wanted = {"id": "call0", "type": "custom", "custom": {"name": "patch", "input": "a\n0"}}
    assert streamed == [wanted | {"index": 0}]


def test_functions_are_called_as_before_tools(gpt: openai.OpenAI) -> None:
    body = asked("n=0 calls=1", functions=[FUNCTION], function_call="auto")
    whole = gpt.chat.completions.create(**body)
    call: Any = whole.choices[0].message.function_call
    assert (call.name, json.loads(call.arguments)) == ("f", {"input": "a\n0"})
    chunks = list(gpt.chat.completions.create(**body, stream=True))
    parts = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert "".join(part.name or "" for part in parts if part) == "f"
    assert "".join(part.arguments or "" for part in parts if part) == call.arguments
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "function_call"


def test_choices_come_side_by_side_and_their_prompt_counts_once(
    gpt: openai.OpenAI, fake: FakeServer
) -> None:
    before = time.time()
    body = asked("n=2 reason=1 delay=0.01", n=3, seed=5, logprobs=True)
    whole = gpt.chat.completions.create(**body)
    assert [row.message.content for row in whole.choices] == ["tok0 tok1 "] * 3
    assert [row.index for row in whole.choices] == [0, 1, 2]
    assert [len(row.logprobs.content or ()) for row in whole.choices if row.logprobs] == [2, 2, 2]
    submitted = fake.events("Submit", before)
    assert [row["sampling"]["seed"] for row in submitted] == [5, 6, 7]
    with gpt.chat.completions.stream(**body, stream_options=USAGE) as stream:
        list(stream)
        final = stream.get_final_completion()
    assert [row.message.content for row in final.choices] == ["tok0 tok1 "] * 3
    assert [row.finish_reason for row in final.choices] == ["stop"] * 3
    one = gpt.chat.completions.create(**asked("n=2 reason=1 delay=0.01")).usage
    for usage in (whole.usage, final.usage):
        assert usage is not None and one is not None
        assert usage.prompt_tokens == one.prompt_tokens
        assert usage.completion_tokens == 3 * one.completion_tokens == 9


def test_one_failed_choice_fails_them_all_and_leaves_none_running(
    gpt: openai.OpenAI, fake: FakeServer
) -> None:
    before = time.time()
    with pytest.raises(openai.InternalServerError):
        gpt.chat.completions.create(**asked("n=50 delay=0.02 fail=2", n=2))
    submitted = {row["request_id"] for row in fake.events("Submit", before)}
    assert len(submitted) == 2

    def ended() -> set[str]:
        rows = [*fake.events("Cancel", before), *fake.events("done", before)]
        return {row["request_id"] for row in rows}

    fake.until(lambda: submitted <= ended())


def test_every_chunk_is_of_one_stream_and_says_when_it_is_not_the_last(fake: FakeServer) -> None:
    body = asked("n=2 reason=1 calls=1", tools=TOOLS, stream_options=USAGE)
    *rows, usage = rows_of(fake, body)
    assert rows[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len({(row["id"], row["created"], row["model"], row["object"]) for row in rows}) == 1
    reasons = [row["choices"][0]["finish_reason"] for row in rows]
    assert reasons == [None] * (len(rows) - 1) + ["tool_calls"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] == 1
    more = [call for row in rows for call in row["choices"][0]["delta"].get("tool_calls", ())][1:]
    assert all(set(call) == {"index", "function"} for call in more)


def test_what_an_answer_has_to_be_reaches_the_worker(gpt: openai.OpenAI, fake: FakeServer) -> None:
    before = time.time()
    schema = {"type": "object", "properties": {}}
    inner: Any = {"name": "x", "schema": schema}
    gpt.chat.completions.create(
        **asked("n=1", tools=TOOLS),
        tool_choice={"type": "function", "function": {"name": "g"}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": inner},
        extra_body={"thinking_budget": 5},
    )
    (row,) = fake.events("Submit", before)
    assert row["constraints"] == {
        "tool_choice": "required",
        "tool_names": ["g"],
        "parallel_calls": False,
        "is_json": True,
        "schema": schema,
        "thinking_budget": 5,
    }
    assert row["prompt"]["thinking"] == {"on": True, "level": None, "budget": 5}
    assert [tool["function"]["name"] for tool in row["prompt"]["tools"]] == ["f", "g"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_reaches_the_worker_and_what_came_of_it_the_client(
    gpt: openai.OpenAI, fake: FakeServer, stream: bool
) -> None:
    before = time.time()
    body = asked("n=9 accepted=6 rejected=2", extra_body={"speculate": True, "kv_bits": 4})
    body["prediction"] = {"type": "content", "content": [{"type": "text", "text": "tok0 tok1"}]}
    if stream:
        with gpt.chat.completions.stream(**body, stream_options=USAGE) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = gpt.chat.completions.create(**body)
    assert answer.choices[0].message.content == "".join(f"tok{i} " for i in range(9))
    details = answer.usage.completion_tokens_details
    told = (details.accepted_prediction_tokens, details.rejected_prediction_tokens)
    assert told == (6, 2)
    assert answer.usage.speculation == {
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 2,
        "decode_forwards": 3,
    }
    (row,) = fake.events("Submit", before)
    assert (row["prediction"], row["sampling"]["speculate"]) == ("tok0 tok1", True)
    assert row["kv_bits"] == 4
    assert "tok0 tok1" not in json.dumps(row["prompt"])


def test_a_malformed_prediction_is_told_in_openais_shape(gpt: openai.OpenAI) -> None:
    refused: Any = {"prediction": {"type": "content", "content": [{"type": "image_url"}]}}
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.chat.completions.create(**asked("n=1"), **refused)
    assert caught.value.param == "prediction.content[0].type"


def test_a_raw_prompt_is_completed_without_a_template(gpt: openai.OpenAI, fake: FakeServer) -> None:
    before = time.time()
    whole = gpt.completions.create(model="gpt-x", prompt="n=2", logprobs=1, max_tokens=9)
    assert whole.choices[0].text == "tok0 tok1 "
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.text_offset == [0, 5]
    assert whole.usage is not None and whole.usage.completion_tokens == 2
    (row,) = fake.events("Submit", before)
    assert (row["prompt"]["messages"], row["prompt"]["text"]) == ([], "n=2")
    chunks = list(gpt.completions.create(model="gpt-x", prompt="n=2", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "tok0 tok1 "
    assert chunks[-1].choices[0].finish_reason == "stop"
    ids = gpt.completions.create(model="gpt-x", prompt=[[1, 2], [3, 4, 5]], n=2)
    assert [row.index for row in ids.choices] == [0, 1, 2, 3]
    assert ids.usage is not None and ids.usage.prompt_tokens == 5
    with pytest.raises(openai.BadRequestError, match="suffix"):
        gpt.completions.create(model="gpt-x", prompt="x", suffix="y")
