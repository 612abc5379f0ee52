"""Chat completions over a real server, read by OpenAI's client: calls, choices, raw prompts."""

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.servers.fake_server import FakeServer

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
OTHER = {"name": "g", "parameters": {"type": "object"}}
TOOLS: list[Any] = [{"type": "function", "function": row} for row in (FUNCTION, OTHER)]
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
    body = asked("n=9 accepted=6 rejected=2", extra_body={"speculate": True})
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
    assert "tok0 tok1" not in json.dumps(row["prompt"])
