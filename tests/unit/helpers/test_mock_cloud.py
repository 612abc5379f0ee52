"""The official SDKs understand the mock cloud, and it refuses what the real services refuse."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.helpers.cloud import cloud_answers as answers
from tests.helpers.cloud.byte_sink import ByteSink
from tests.helpers.cloud.cloud_answers import CloudAnswer, CloudCall
from tests.helpers.cloud.openai_replies import embedding
from tests.helpers.servers.mock_cloud import KEY, MockCloud

pytestmark = pytest.mark.process

THOUGHTFUL = CloudAnswer(
    "It is fine.", "Look at the sky.", calls=(CloudCall("sky", {"at": "noon"}),)
)
WEATHER = {"type": "object", "properties": {"at": {"type": "string"}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "sky", "parameters": WEATHER}}
MESSAGES_TOOL: Any = {"name": "sky", "input_schema": WEATHER}
RESPONSES_TOOL: Any = {"type": "function", "name": "sky", "parameters": WEATHER, "strict": False}


@pytest.fixture(scope="module")
def running() -> Iterator[MockCloud]:
    with MockCloud() as made:
        yield made


@pytest.fixture
def cloud(running: MockCloud) -> MockCloud:
    running.forget()
    return running


@pytest.fixture
def gpt(cloud: MockCloud) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cloud.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(cloud: MockCloud) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=cloud.url, api_key=KEY, max_retries=0) as client:
        yield client


def user(text: str = "How is the sky?") -> Any:
    return {"role": "user", "content": text}


# ---------------------------------------------------------------- chat


def test_chat_answers_whole_with_calls_logprobs_and_usage(
    cloud: MockCloud, gpt: openai.OpenAI
) -> None:
    cloud.say(THOUGHTFUL)
    told = gpt.chat.completions.create(
        model="gpt-x", messages=[user()], tools=[CHAT_TOOL], logprobs=True, top_logprobs=2
    )
    (choice,) = told.choices
    assert choice.message.content == "It is fine."
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"at": "noon"}
    assert choice.logprobs is not None
    assert [row.token for row in choice.logprobs.content or []] == ["It ", "is ", "fine."]
    assert told.usage is not None
    assert told.usage.completion_tokens_details is not None
    assert told.usage.completion_tokens_details.reasoning_tokens == 5
    assert told.usage.completion_tokens > 5


def test_chat_streams_and_a_known_beginning_counts_as_cached(
    cloud: MockCloud, gpt: openai.OpenAI
) -> None:
    history = [user("A question that no other test asks."), {"role": "assistant", "content": "So."}]
    told = []
    for messages in (history[:1], [*history, user("And now?")]):
        with gpt.chat.completions.create(
            model="gpt-x", messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == answers.HELLO.text
        usage = chunks[-1].usage
        assert usage is not None and usage.prompt_tokens_details is not None
        told.append((usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens))
    assert [cached for _, cached in told] == [0, told[0][0]]


def test_completions_and_embeddings_answer(cloud: MockCloud, gpt: openai.OpenAI) -> None:
    whole = gpt.completions.create(model="gpt-x", prompt="Once")
    with gpt.completions.create(model="gpt-x", prompt="Once", stream=True) as stream:
        streamed = "".join(chunk.choices[0].text for chunk in stream)
    assert whole.choices[0].text == streamed == answers.HELLO.text
    vectors = gpt.embeddings.create(model="gpt-e", input=["one", "two"]).data
    assert [row.embedding for row in vectors] == [embedding("one"), embedding("two")]


# ---------------------------------------------------------------- Responses


def test_responses_streams_items_that_can_be_sent_back_by_id_or_sealed(
    cloud: MockCloud, gpt: openai.OpenAI
) -> None:
    for stored in (True, False):
        cloud.say(THOUGHTFUL)
        with gpt.responses.stream(
            model="gpt-x",
            input="How is the sky?",
            tools=[RESPONSES_TOOL],
            store=stored,
            include=["reasoning.encrypted_content"],
        ) as stream:
            first = stream.get_final_response()
        kinds = [item.type for item in first.output]
        assert kinds == ["reasoning", "message", "function_call"]
        assert first.usage is not None
        assert first.usage.output_tokens_details.reasoning_tokens == 5
        call = first.output[2]
        assert call.type == "function_call"
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
        items: Any = [unparsed(item.to_dict()) for item in first.output]
        full = [user(), *items, output]
        assert gpt.responses.create(model="gpt-x", input=full).output_text == answers.HELLO.text
        if stored:
            again = gpt.responses.create(
                model="gpt-x", previous_response_id=first.id, input=[output]
            )
            assert again.output_text == answers.HELLO.text
        else:
            with pytest.raises(openai.BadRequestError, match="not found"):
                gpt.responses.create(model="gpt-x", previous_response_id=first.id, input="And?")


def unparsed(value: Any) -> Any:
    """Return an item as it came, without what the SDK puts in when it streams."""
    if isinstance(value, dict):
        return {name: unparsed(each) for name, each in value.items() if "parsed" not in name}
    return [unparsed(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("fields", "status", "match"),
    [
        ({"id": "rs_foreign"}, 404, "Item with id 'rs_foreign' not found"),
        ({"encrypted_content": "Zm9yZWlnbg=="}, 400, "could not be verified"),
    ],
)
def test_responses_refuses_reasoning_that_it_did_not_write(
    cloud: MockCloud, gpt: openai.OpenAI, fields: Any, status: int, match: str
) -> None:
    item: Any = {"type": "reasoning", "summary": [], **fields}
    with pytest.raises(openai.APIStatusError, match=match) as caught:
        gpt.responses.create(model="gpt-x", input=[user(), item])
    assert caught.value.status_code == status


def test_responses_refuses_items_apart_from_their_reasoning_and_half_pairs(
    cloud: MockCloud, gpt: openai.OpenAI
) -> None:
    cloud.say(THOUGHTFUL)
    first = gpt.responses.create(model="gpt-x", input="How?", tools=[RESPONSES_TOOL])
    items: Any = [item.to_dict() for item in first.output]
    output = {"type": "function_call_output", "call_id": items[2]["call_id"], "output": "blue"}
    for told, match in (
        ([user(), *items[1:], output], "without its required 'reasoning' item"),
        ([user(), items[0], user()], "without its required following item"),
        ([user(), *items], "No tool output found"),
        ([user(), output], "No tool call found"),
        ([user(), {**items[1], "id": "msg_foreign"}], "not found"),
        ([user(), {**items[1], "id": "other"}], "Expected an ID that begins with 'msg'"),
    ):
        with pytest.raises(openai.APIStatusError, match=match):
            gpt.responses.create(model="gpt-x", input=told)


# ---------------------------------------------------------------- Messages


def test_messages_streams_signed_thinking_that_can_be_sent_back(
    cloud: MockCloud, claude: anthropic.Anthropic
) -> None:
    cloud.say(CloudAnswer("Fine.", "Look up.", "Hidden.", (CloudCall("sky", {"at": "noon"}),)))
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    rest: Any = {"model": "claude-x", "max_tokens": 2000, "tools": [MESSAGES_TOOL]}
    with claude.messages.stream(messages=[user()], thinking=thinking, **rest) as stream:
        message = stream.get_final_message()
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "redacted_thinking", "text", "tool_use"]
    assert message.stop_reason == "tool_use"
    blocks: Any = [block.to_dict() for block in message.content]
    result = {"type": "tool_result", "tool_use_id": blocks[3]["id"], "content": "blue"}

    def back(said: Any, *results: Any) -> Any:
        rows = [user(), {"role": "assistant", "content": said}]
        rows.append({"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]})
        return claude.messages.create(messages=rows, thinking=thinking, **rest)

    assert back(blocks, result).content[0].text == answers.HELLO.text
    forged = {**blocks[0], "thinking": "Look down."}
    for said, results, match in (
        ([forged, *blocks[1:]], [result], "Invalid `signature` in `thinking` block"),
        ([{**blocks[0], "signature": ""}, *blocks[1:]], [result], "Invalid `signature`"),
        ([blocks[0], {**blocks[1], "data": "eA=="}, *blocks[2:]], [result], "Invalid `data`"),
        (blocks[2:], [result], "Expected `thinking` or `redacted_thinking`, but found `text`"),
        (blocks, [], "without `tool_result` blocks"),
        (blocks[:3], [result], "unexpected `tool_use_id`"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=match):
            back(said, *results)


def test_messages_counts_what_it_reads_and_tells_what_was_cached(
    cloud: MockCloud, claude: anthropic.Anthropic
) -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    rest: Any = {"model": "claude-x", "system": system, "messages": [user("Only here.")]}
    counted = claude.messages.count_tokens(**rest).input_tokens
    first = claude.messages.create(max_tokens=9, **rest).usage
    second = claude.messages.create(max_tokens=9, **rest).usage
    assert first.input_tokens == counted
    assert (first.cache_read_input_tokens, second.cache_read_input_tokens) == (0, counted)
    assert second.input_tokens == 0


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("path", "body", "match"),
    [
        ("/v1/chat/completions", {"messages": [user()], "api_base": "x"}, "api_base"),
        ("/v1/chat/completions", {"messages": [{**user(), "foo": 1}]}, "foo"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/completions", {"prompt": "x", "top_k": 1}, "top_k"),
        ("/v1/embeddings", {"input": "x", "user_config": {}}, "user_config"),
        ("/v1/responses", {"input": "x", "session_id": "s"}, "session_id"),
        ("/v1/messages", {"messages": [user()], "max_tokens": 9, "tags": []}, "tags"),
        ("/v1/messages", {"messages": [user()]}, "max_tokens"),
        (
            "/v1/messages",
            {"messages": [{"role": "system", "content": "x"}], "max_tokens": 9},
            "role",
        ),
    ],
)
def test_a_field_that_the_service_does_not_know_is_refused(
    cloud: MockCloud, path: str, body: dict[str, Any], match: str
) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    told = httpx.post(cloud.url + path, json={"model": "m", **body}, headers=headers)
    assert told.status_code == 400
    assert match in told.json()["error"]["message"]
    assert ("request_id" in told.json()) == (path == "/v1/messages")


def test_errors_have_the_providers_shapes(
    cloud: MockCloud, gpt: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    cloud.answers["busy"] = CloudAnswer(error=answers.RATE_LIMIT)
    with pytest.raises(openai.RateLimitError, match="Rate limit") as caught:
        gpt.chat.completions.create(model="busy", messages=[user()])
    assert caught.value.response.headers["retry-after"] == "20"
    cloud.answers["busy"] = CloudAnswer(error=answers.OVERLOADED)
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error"):
        claude.messages.create(model="busy", messages=[user()], max_tokens=9)
    stranger = anthropic.Anthropic(base_url=cloud.url, api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError, match="sk-wrong"):
        stranger.messages.create(model="m", messages=[user()], max_tokens=9)


# ---------------------------------------------------------------- breaking off


def in_a_stream(cloud: MockCloud, **script: Any) -> Callable[[], list[bytes]]:
    cloud.say(CloudAnswer("One two three four.", **script))
    body = {"model": "m", "messages": [user()], "stream": True}
    headers = {"authorization": f"Bearer {KEY}"}

    def read() -> list[bytes]:
        url = f"{cloud.url}/v1/chat/completions"
        seen: list[bytes] = []
        with httpx.stream("POST", url, json=body, headers=headers, timeout=0.5) as told:
            seen.append(b"head")
            seen.extend(told.iter_raw())
        return seen

    return read


@pytest.mark.parametrize("place", ["before the head", "behind the head", "amid the text"])
def test_a_connection_is_dropped_or_hangs_where_the_script_says(
    cloud: MockCloud, place: answers.Place
) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        in_a_stream(cloud, drops=place)()
    with pytest.raises(httpx.ReadTimeout):
        in_a_stream(cloud, hangs=place)()
    cloud.until(lambda: [row.left_at for row in cloud.requests if row.left_at is not None][1:])


def test_an_error_may_come_amid_a_stream(cloud: MockCloud) -> None:
    read = in_a_stream(cloud, error=answers.SERVER_ERROR, error_place="amid the text")
    text = b"".join(read())
    assert b"One" in text and b"four." not in text
    assert b'"server_error"' in text


def test_a_client_that_leaves_is_noticed_at_once(cloud: MockCloud, gpt: openai.OpenAI) -> None:
    cloud.say(CloudAnswer("a b c d e f", piece_s=0.2))
    with gpt.chat.completions.create(model="m", messages=[user()], stream=True) as stream:
        next(iter(stream))
    left = time.monotonic()
    record = cloud.requests[-1]
    cloud.until(lambda: record.left_at is not None, 2.0)
    assert record.left_at is not None
    assert record.left_at - left < 0.5
    assert record.ended_at is None


def test_a_sink_keeps_every_byte() -> None:
    with ByteSink() as sink, pytest.raises(httpx.TransportError):
        httpx.post(f"{sink.url}/v1/models", json={"secret": 1})
    assert b"/v1/models" in sink.seen[0]
