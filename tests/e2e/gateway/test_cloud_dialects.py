"""Every dialect reaches a cloud of either provider: streams, tools, images, errors, cancels."""

import base64
import io
import json
import socket
from collections.abc import Iterator
from typing import Any, Final

import anthropic
import httpx
import openai
import pytest
from PIL import Image

from tests.helpers.cloud import cloud_answers as answers
from tests.helpers.cloud.cloud_answers import HELLO, CloudAnswer, CloudCall
from tests.helpers.cloud.dialect_requests import DIALECTS, PATHS, ask, body_of
from tests.helpers.cloud.gateway_server import GatewayServer
from tests.helpers.cloud.openai_replies import embedding
from tests.helpers.servers.mock_cloud import MockCloud

CLOUDS: Final = {"cloud": "openai/gpt-mock", "claude-cloud": "anthropic/claude-mock"}
SCHEMA: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
CALLS: Final = (CloudCall("weather", {"city": "Oslo"}), CloudCall("weather", {"city": "Rome"}))
TOOLS: Final[dict[str, Any]] = {
    "chat": {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    "messages": {"name": "weather", "input_schema": SCHEMA},
    "responses": {"type": "function", "name": "weather", "parameters": SCHEMA},
}
Claude = anthropic.Anthropic
Gpt = openai.OpenAI


@pytest.fixture
def gpt(gateway: GatewayServer) -> Iterator[Gpt]:
    with gateway.openai() as client:
        yield client


@pytest.fixture
def claude(gateway: GatewayServer) -> Iterator[Claude]:
    with Claude(base_url=gateway.url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def picture() -> str:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", CLOUDS)
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_an_answer_comes_through_with_its_usage(
    gateway: GatewayServer, cloud: MockCloud, dialect: str, model: str, stream: bool
) -> None:
    more = {"stream_options": {"include_usage": True}} if stream and dialect == "chat" else {}
    body = body_of(dialect, model, "How are you?", stream=stream, **more)
    answer = ask(gateway.url, dialect, body)
    assert answer.status == 200, answer.raw
    assert answer.text == HELLO.text
    assert answer.served_by == CLOUDS[model]
    assert not answer.fallback
    (request,) = cloud.generations()
    usage = request.usage
    assert answer.usage == (usage.prompt, usage.cached, usage.completion)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", ["cloud", "text-cloud"])
def test_a_completion_comes_through(
    gateway: GatewayServer, cloud: MockCloud, model: str, stream: bool
) -> None:
    answer = ask(
        gateway.url, "completions", body_of("completions", model, "Once upon", stream=stream)
    )
    assert answer.text == HELLO.text, answer.raw
    assert len(cloud.generations()) == 1


def test_embeddings_come_through(cloud: MockCloud, gpt: Gpt) -> None:
    told = gpt.embeddings.create(model="embed-cloud", input=["one", "two"])
    assert [row.embedding for row in told.data] == [embedding("one"), embedding("two")]
    assert told.usage.prompt_tokens > 0
    assert [request.path for request in cloud.generations()] == ["/v1/embeddings"]


def test_tokens_are_counted_by_the_cloud(cloud: MockCloud, claude: Claude) -> None:
    rows: Any = [{"role": "user", "content": "How many tokens is this?"}]
    counted = claude.messages.count_tokens(model="claude-cloud", messages=rows).input_tokens
    used = claude.messages.create(model="claude-cloud", messages=rows, max_tokens=9).usage
    assert counted == used.input_tokens
    paths = [request.path for request in cloud.requests if request.method == "POST"]
    assert paths == ["/v1/messages/count_tokens", "/v1/messages"]


def test_the_cloud_models_are_listed(gateway: GatewayServer) -> None:
    names = {row["id"] for row in gateway.get("/v1/models")["data"]}
    assert {"local", "second", "cloud", "claude-cloud", "local-first"} <= names


def test_a_stream_comes_as_it_is_written(gateway: GatewayServer, cloud: MockCloud) -> None:
    """The first words are there although the last ones never come."""
    for dialect in DIALECTS:
        cloud.say(CloudAnswer("one two three four five six", hangs="amid the text"))
        body = body_of(dialect, "cloud", "Count.", stream=True)
        with httpx.stream("POST", gateway.url + PATHS[dialect], json=body, timeout=30) as told:
            assert any("one" in piece for piece in told.iter_text()), dialect


# ---------------------------------------------------------------- tools, images, logprobs


@pytest.mark.parametrize("model", CLOUDS)
def test_parallel_calls_and_their_results_come_through_chat(
    cloud: MockCloud, gpt: Gpt, model: str
) -> None:
    tools: Any = [TOOLS["chat"]]
    rows: Any = [{"role": "user", "content": "Weather?"}]
    for stream in (False, True):
        cloud.say(CloudAnswer("", calls=CALLS))
        if stream:
            with gpt.chat.completions.stream(model=model, messages=rows, tools=tools) as told:
                message = told.get_final_completion().choices[0].message
        else:
            made = gpt.chat.completions.create(model=model, messages=rows, tools=tools)
            message = made.choices[0].message
        calls: Any = message.tool_calls
        assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
        kept = [call.to_dict() for call in calls]
        for call in kept:
            call["function"].pop("parsed_arguments", None)
        back = [{"role": "assistant", "content": None, "tool_calls": kept}]
        back += [{"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in kept]
        again = gpt.chat.completions.create(model=model, messages=rows + back, tools=tools)
        assert again.choices[0].message.content == HELLO.text


@pytest.mark.parametrize("model", CLOUDS)
def test_parallel_calls_and_their_results_come_through_messages(
    cloud: MockCloud, claude: Claude, model: str
) -> None:
    rest: Any = {"model": model, "tools": [TOOLS["messages"]], "max_tokens": 99}
    rows: Any = [{"role": "user", "content": "Weather?"}]
    for stream in (False, True):
        cloud.say(CloudAnswer("", calls=CALLS))
        if stream:
            with claude.messages.stream(messages=rows, **rest) as told:
                message = told.get_final_message()
        else:
            message = claude.messages.create(messages=rows, **rest)
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
        assert message.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "fine"} for call in calls
        ]
        back: Any = [
            {"role": "assistant", "content": [block.to_dict() for block in message.content]},
            {"role": "user", "content": results},
        ]
        again: Any = claude.messages.create(messages=rows + back, **rest)
        assert again.content[0].text == HELLO.text


@pytest.mark.parametrize("model", CLOUDS)
def test_parallel_calls_and_their_results_come_through_responses(
    cloud: MockCloud, gpt: Gpt, model: str
) -> None:
    tools: Any = [TOOLS["responses"]]
    for stream in (False, True):
        cloud.say(CloudAnswer("", calls=CALLS))
        body: Any = body_of("responses", model, "Weather?", tools=tools)
        if stream:
            with gpt.responses.stream(**body) as told:
                made: Any = told.get_final_response()
        else:
            made = gpt.responses.create(**body)
        calls = [item for item in made.output if item.type == "function_call"]
        assert [json.loads(call.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
        outputs: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "fine"}
            for call in calls
        ]
        again = gpt.responses.create(
            model=model, previous_response_id=made.id, input=outputs, tools=tools
        )
        assert again.output_text == HELLO.text


@pytest.mark.parametrize("model", CLOUDS)
def test_images_come_through(gateway: GatewayServer, cloud: MockCloud, model: str) -> None:
    data = picture()
    url = f"data:image/png;base64,{data}"
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts: dict[str, Any] = {
        "chat": {"type": "image_url", "image_url": {"url": url}},
        "messages": {"type": "image", "source": source},
        "responses": {"type": "input_image", "image_url": url, "detail": "auto"},
    }
    for dialect, part in parts.items():
        cloud.forget()
        kind = "input_text" if dialect == "responses" else "text"
        rows = [{"role": "user", "content": [{"type": kind, "text": "What is it?"}, part]}]
        field = "input" if dialect == "responses" else "messages"
        body = body_of(dialect, model, "") | {field: rows}
        answer = ask(gateway.url, dialect, body)
        assert answer.text == HELLO.text, answer.raw
        (request,) = cloud.generations()
        assert data in request.body.decode(), dialect


def test_log_probabilities_come_through(cloud: MockCloud, gpt: Gpt) -> None:
    rows: Any = [{"role": "user", "content": "Hi"}]
    told = gpt.chat.completions.create(model="cloud", messages=rows, logprobs=True, top_logprobs=2)
    logprobs = told.choices[0].logprobs
    assert logprobs is not None
    assert "".join(row.token for row in logprobs.content or ()) == HELLO.text


def test_signed_and_hidden_thinking_comes_through_and_back(
    cloud: MockCloud, claude: Claude
) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    rest: Any = {"model": "claude-cloud", "max_tokens": 2000, "thinking": thinking}
    rows: Any = [{"role": "user", "content": "Think."}]
    for stream in (False, True):
        cloud.say(CloudAnswer("So.", "Because of that.", "Nobody sees it."))
        if stream:
            with claude.messages.stream(messages=rows, **rest) as told:
                message = told.get_final_message()
        else:
            message = claude.messages.create(messages=rows, **rest)
        assert [block.type for block in message.content] == [
            "thinking",
            "redacted_thinking",
            "text",
        ]
        back: Any = [block.to_dict() for block in message.content]
        said: Any = [{"role": "assistant", "content": back}, {"role": "user", "content": "And?"}]
        again: Any = claude.messages.create(messages=rows + said, **rest)
        assert again.content[0].text == HELLO.text
        kept = cloud.requests[-1].json["messages"][1]["content"]
        assert [block["type"] for block in kept] == ["thinking", "redacted_thinking", "text"]


def test_sealed_reasoning_comes_through_and_back(cloud: MockCloud, gpt: Gpt) -> None:
    rest: Any = {"model": "cloud", "include": ["reasoning.encrypted_content"], "store": False}
    cloud.say(CloudAnswer("So.", "Because of that."))
    first = gpt.responses.create(input="Think.", **rest)
    assert [item.type for item in first.output] == ["reasoning", "message"]
    history: Any = [{"role": "user", "content": "Think."}]
    history += [item.to_dict() for item in first.output]
    history += [{"role": "user", "content": "And?"}]
    assert gpt.responses.create(input=history, **rest).output_text == HELLO.text
    kinds = [item.get("type", "message") for item in cloud.requests[-1].json["input"]]
    assert "reasoning" in kinds


# ---------------------------------------------------------------- errors

ERRORS: Final = {
    "invalid": (answers.INVALID, 400),
    "context": (answers.CONTEXT_LENGTH, 400),
    "forbidden": (answers.FORBIDDEN, 403),
    "rate": (answers.RATE_LIMIT, 429),
    "server": (answers.SERVER_ERROR, 500),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("model", CLOUDS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_clouds_error_comes_in_the_clients_dialect(
    gateway: GatewayServer, cloud: MockCloud, name: str, model: str, stream: bool
) -> None:
    error, status = ERRORS[name]
    for dialect in ("chat", "messages", "responses"):
        cloud.forget()
        cloud.say(CloudAnswer(error=error))
        answer = ask(gateway.url, dialect, body_of(dialect, model, "Hi", stream=stream))
        assert answer.status == status, (dialect, answer.raw)
        words = max(error.message.split("'"), key=len)  # LiteLLM may quote it
        assert words in answer.error, (dialect, answer.raw)
        (row,) = answer.rows
        assert (row.get("type") == "error") == (dialect == "messages"), row
        if name == "rate":
            assert int(answer.headers["retry-after"]) > 0, dialect
        assert len(cloud.generations()) == 1


def test_an_unknown_model_of_the_cloud_is_told(gateway: GatewayServer, cloud: MockCloud) -> None:
    cloud.say(CloudAnswer(error=answers.no_model("gpt-mock")))
    answer = ask(gateway.url, "chat", body_of("chat", "cloud", "Hi"))
    assert answer.status == 404
    assert "gpt-mock" in answer.error


# ---------------------------------------------------------------- cancels


def leave(gateway: GatewayServer, path: str, body: dict[str, Any], *, after: bytes) -> None:
    """Send a request, read until `after` comes (not at all where it is empty), and hang up."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.settimeout(20)
        client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        seen = b""
        while after not in seen:
            seen += (piece := client.recv(65_536))
            assert piece, seen
        if not after:
            gateway.cloud.until(lambda: gateway.cloud.generations())


@pytest.mark.parametrize("model", CLOUDS)
@pytest.mark.parametrize("place", ["before the head", "behind the head", "amid the text"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_the_clouds_request(
    gateway: GatewayServer, cloud: MockCloud, model: str, place: answers.Place, stream: bool
) -> None:
    text = "one two three four five six"
    for dialect in ("chat", "messages", "responses"):
        cloud.forget()
        cloud.say(CloudAnswer(text, hangs=place))
        waits_for = b"one" if stream and place == "amid the text" else b""
        body = body_of(dialect, model, "Hi", stream=stream)
        leave(gateway, PATHS[dialect], body, after=waits_for)
        (request,) = cloud.generations()
        # Its connection is closed: by itself it would hang for as long as it is open.
        cloud.until(lambda request=request: request.left_at is not None)
        assert request.left_at is not None
        assert len(cloud.generations()) == 1
