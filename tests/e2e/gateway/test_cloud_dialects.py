"""Every dialect reaches a cloud of either provider: streams, tools, images, errors, cancels."""

import base64
import io
import json
import socket
from typing import Any, Final

import httpx
import pytest
from PIL import Image

from tests.helpers.clients.sdk_conversations import CLOCK, OSLO, TALKS, UTC, WEATHER, sdks_of
from tests.helpers.cloud.cloud_answers import ERRORS, HELLO, CloudAnswer, CloudCall, Place
from tests.helpers.cloud.cloud_replies import embedding
from tests.helpers.cloud.dialect_requests import (
    DIALECTS,
    PATHS,
    ask,
    body_of,
    in_each_way,
    with_usage,
)
from tests.helpers.cloud.gateway_server import GatewayServer
from tests.helpers.servers.mock_cloud import MockCloud

CLOUDS: Final = {"cloud": "openai/gpt-mock", "claude-cloud": "anthropic/claude-mock"}
CHATS: Final = DIALECTS[:3]
before_each_cloud = pytest.mark.parametrize("model", CLOUDS)
in_each_chat = pytest.mark.parametrize("dialect", CHATS)
whole_or_stream = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.mark.parametrize("model", [*CLOUDS, "text-cloud"])
@in_each_way
def test_an_answer_comes_through_with_its_usage(
    gateway: GatewayServer, cloud: MockCloud, dialect: str, model: str, stream: bool
) -> None:
    if (dialect == "completions") != (model == "text-cloud") and model != "cloud":
        return  # Anthropic has no completions, and of those there is nothing else
    body = body_of(dialect, model, "Who?", **with_usage(dialect, stream))
    answer = ask(gateway.url, dialect, body)
    assert (answer.status, answer.text) == (200, HELLO.text), answer.raw
    assert answer.served_by == CLOUDS.get(model, "text-completion-openai/text-mock")
    (request,) = cloud.generations()
    assert answer.usage == request.usage


def test_embeddings_counts_log_probabilities_and_names_come_through(
    gateway: GatewayServer, cloud: MockCloud
) -> None:
    with gateway.openai() as gpt:
        told = gpt.embeddings.create(model="embed-cloud", input=["one", "two"])
        assert [row.embedding for row in told.data] == [embedding("one"), embedding("two")]
        assert told.usage.prompt_tokens > 0
    answer = ask(gateway.url, "chat", body_of("chat", "cloud", "Hi", logprobs=True))
    rows = answer.rows[0]["choices"][0]["logprobs"]["content"]
    assert "".join(row["token"] for row in rows) == HELLO.text
    body = body_of("messages", "claude-cloud", "How many tokens is this?")
    count = ask(gateway.url, "messages", body).usage[0]
    del body["max_tokens"]
    counted = httpx.post(f"{gateway.url}/v1/messages/count_tokens", json=body, timeout=60)
    assert counted.json()["input_tokens"] == count > 0
    assert cloud.requests[-1].path == "/v1/messages/count_tokens"
    names = {row["id"] for row in gateway.get("/v1/models")["data"]}
    assert {"local", "second", "cloud", "claude-cloud", "local-first"} <= names


@whole_or_stream
@before_each_cloud
@in_each_chat
def test_parallel_calls_their_results_and_images_come_through(
    gateway: GatewayServer, cloud: MockCloud, dialect: str, model: str, stream: bool
) -> None:
    calls = [(call.name, call.arguments) for call in (OSLO, UTC)]
    cloud.say(CloudAnswer("", calls=tuple(CloudCall(*call) for call in calls)))
    with sdks_of(gateway) as sdks:
        talk = TALKS[dialect](sdks, model=model).user("Weather, and the time?")
        told = talk.ask(stream=stream, tools=(WEATHER, CLOCK))
        assert (told.calls, told.reason) == (calls, "tool_calls")
        for call_id in told.call_ids:
            talk.result(call_id, "fine")
        assert talk.ask(stream=stream, tools=(WEATHER, CLOCK)).content == HELLO.text
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    url = f"data:image/png;base64,{data}"
    source = {"type": "base64", "media_type": "image/png", "data": data}
    part: Any = {
        "chat": {"type": "image_url", "image_url": {"url": url}},
        "messages": {"type": "image", "source": source},
        "responses": {"type": "input_image", "image_url": url, "detail": "auto"},
    }[dialect]
    kind = "input_text" if dialect == "responses" else "text"
    content = [{"type": kind, "text": "What is it?"}, part]
    answer = ask(gateway.url, dialect, body_of(dialect, model, content, stream=stream))
    assert answer.text == HELLO.text, answer.raw
    assert data in cloud.generations()[-1].body.decode()


# ---------------------------------------------------------------- errors and cancels


@pytest.mark.parametrize(
    "name",
    ["invalid", "context length", "forbidden", "rate limit", "server error", "no model"],
)
@before_each_cloud
@whole_or_stream
def test_the_clouds_error_comes_in_the_clients_dialect(
    gateway: GatewayServer, cloud: MockCloud, name: str, model: str, stream: bool
) -> None:
    error = ERRORS[name]
    for dialect in CHATS:
        cloud.forget()
        cloud.say(CloudAnswer(error=error))
        answer = ask(gateway.url, dialect, body_of(dialect, model, "Hi", stream=stream))
        assert answer.status == error.status, (dialect, answer.raw)
        words = max(error.message.split("'"), key=len)  # LiteLLM may quote it
        assert words in answer.error, (dialect, answer.raw)
        (row,) = answer.rows
        assert (row.get("type") == "error") == (dialect == "messages"), row
        assert (int(answer.headers.get("retry-after", 0)) > 0) == (error.status == 429), dialect
        assert len(cloud.generations()) == 1


@pytest.mark.parametrize("place", ["before the head", "behind the head", "amid the text"])
@before_each_cloud
@whole_or_stream
def test_a_client_that_leaves_cancels_the_clouds_request(
    gateway: GatewayServer, cloud: MockCloud, model: str, place: Place, stream: bool
) -> None:
    for dialect in CHATS:
        cloud.forget()
        cloud.say(CloudAnswer("one two three four five six", hangs=place))
        content = json.dumps(body_of(dialect, model, "Hi", stream=stream)).encode()
        head = f"POST {PATHS[dialect]} HTTP/1.1\r\nhost: localhost\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.settimeout(20)
            client.sendall(head.encode() + content)
            cloud.until(cloud.generations)
            seen = b""
            while stream and place == "amid the text" and b"one" not in seen:
                seen += (piece := client.recv(65_536))
                assert piece, seen
        (request,) = cloud.generations()
        # Its connection is closed: by itself it would hang for as long as it is open.
        cloud.until(lambda request=request: request.has_left)
        assert len(cloud.generations()) == 1


# ---------------------------------------------------------------- schemas


def named(links: dict[str, list[str]]) -> dict[str, Any]:
    """Return definitions of which each names those of its row."""
    parts: dict[str, Any] = {
        name: {"type": "object", "anyOf": [{"$ref": f"#/$defs/{other}"} for other in others]}
        for name, others in links.items()
    }
    return {"type": "object", "anyOf": [{"$ref": "#/$defs/0"}], "$defs": parts}


KNOT: Final = named({str(each): ["0", "1", "2"] for each in range(3)})
BOMBS: Final = (
    named({str(each): [str(each + 1)] * 2 for each in range(30)} | {"30": []}),
    {"type": "object", "properties": {"p": KNOT}},
)


@in_each_chat
def test_a_schema_whose_definitions_name_one_another_is_a_400_and_the_next_is_answered(
    gateway: GatewayServer, dialect: str
) -> None:
    for bomb in BOMBS:
        function = {"name": "f", "description": "x", "parameters": bomb}
        tool: dict[str, Any] = {
            "chat": {"type": "function", "function": function},
            "messages": {"name": "f", "description": "x", "input_schema": bomb},
            "responses": {"type": "function", **function},
        }[dialect]
        answer = ask(gateway.url, dialect, body_of(dialect, "gemini-cloud", "Hi", tools=[tool]))
        assert answer.status == 400 and "schema" in answer.error, answer.raw
        assert ask(gateway.url, dialect, body_of(dialect, "cloud", "Hi")).status == 200


def test_what_others_read_wrote_and_cost_stands_in_the_metrics(
    gateway: GatewayServer, cloud: MockCloud
) -> None:
    for number, dialect in enumerate(CHATS):
        body = body_of(dialect, "priced", "Hi", stream=bool(number % 2))
        assert ask(gateway.url, dialect, body).status == 200
    prompt, cached, completion = map(
        sum, zip(*(row.usage for row in cloud.generations()), strict=True)
    )
    sums = {"prompt_tokens": prompt, "cached_tokens": cached, "completion_tokens": completion}
    sums["cost_dollars"] = prompt + completion  # a dollar a token, here
    label = '{served_by="openai/priced-mock"}'
    rows = {f"hearth_cloud_{name}_total{label} {float(value)}" for name, value in sums.items()}
    cloud.until(lambda: rows <= set(httpx.get(f"{gateway.url}/metrics").text.splitlines()))
