"""Checks that refusals reach the SDKs as their own exceptions, with code, field and remedy."""

from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import pytest

from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import Sdks

NO_IMAGE = "data:image/png;base64,bm9uZQ=="
HI: list[Any] = [{"role": "user", "content": "Hi."}]
LONG: list[Any] = [{"role": "user", "content": "word " * 200_000}]
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def chat_audio() -> list[Any]:
    audio = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, audio]}]


def chat_image() -> list[Any]:
    picture = {"type": "image_url", "image_url": {"url": NO_IMAGE}}
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}]


def messages_image(data: str = "iVBORw0KGgo=") -> list[Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    picture = {"type": "image", "source": source}
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}]


def responses_image() -> list[Any]:
    picture = {"type": "input_image", "image_url": NO_IMAGE}
    return [{"role": "user", "content": [{"type": "input_text", "text": "What?"}, picture]}]


@dataclass(frozen=True)
class Refusal:
    body: dict[str, Any]
    code: str
    param: str
    says: str
    kind: type[openai.APIStatusError] = openai.BadRequestError


CHAT = {
    "a sound": Refusal(
        {"messages": chat_audio()},
        "unsupported_content",
        "messages[0].content[1]",
        "text is read here",
    ),
    "an image that is none": Refusal(
        {"messages": chat_image()}, "image_type", "messages[0].content[1].image_url", "neither PNG"
    ),
    "no messages": Refusal({"messages": []}, "empty_messages", "messages", "at least one"),
    "a role": Refusal(
        {"messages": [{"role": "wizard", "content": "x"}]},
        "invalid_request",
        "messages[0].role",
        "wizard",
    ),
    "a temperature": Refusal({"temperature": 9}, "invalid_request", "temperature", "0 to 2"),
    "a limit": Refusal(
        {"max_completion_tokens": 0}, "invalid_request", "max_completion_tokens", "from 1"
    ),
    "a required call without tools": Refusal(
        {"tool_choice": "required"}, "invalid_tool_choice", "tool_choice", "tools"
    ),
    "a tool that is not there": Refusal(
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "invalid_tool_choice",
        "tool_choice.name",
        "'g'",
    ),
    "a prompt that is too long": Refusal(
        {"messages": LONG}, "context_length_exceeded", "messages", "131,07"
    ),
    "a model": Refusal(
        {"model": "llama-99"}, "model_not_found", "model", MODEL, openai.NotFoundError
    ),
    "logprobs without a switch": Refusal(
        {"top_logprobs": 3}, "invalid_request", "top_logprobs", "logprobs: true"
    ),
}
RESPONSES = {
    "an image that is none": Refusal(
        {"input": responses_image()}, "image_type", "input[0].content[1].image_url", "neither PNG"
    ),
    "no input": Refusal({"input": []}, "empty_messages", "input", "at least one"),
    "a limit": Refusal({"max_output_tokens": 0}, "invalid_request", "max_output_tokens", "from 1"),
    "a format": Refusal(
        {"text": {"format": {"type": "yaml"}}}, "invalid_request", "text.format.type", "json_schema"
    ),
    "a response that is not kept": Refusal(
        {"previous_response_id": "resp_0"},
        "previous_response_not_found",
        "previous_response_id",
        "whole conversation",
        openai.NotFoundError,
    ),
    "a prompt that is too long": Refusal(
        {"input": LONG}, "context_length_exceeded", "messages", "131,07"
    ),
    "a model": Refusal(
        {"model": "llama-99"}, "model_not_found", "model", MODEL, openai.NotFoundError
    ),
}


def is_told(error: openai.APIStatusError, wanted: Refusal) -> None:
    assert type(error) is wanted.kind
    assert (error.code, error.param) == (wanted.code, wanted.param)
    assert error.type == "invalid_request_error"
    assert wanted.says in error.message
    assert error.request_id, "it is in the log under this"


@STREAMED
@pytest.mark.parametrize("what", CHAT)
def test_chat_refuses_with_what_helps(sdks: Sdks, what: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": HI, "stream": stream}
    with pytest.raises(openai.APIStatusError) as caught:
        sdks.gpt.chat.completions.create(**(body | CHAT[what].body))
    is_told(caught.value, CHAT[what])


@STREAMED
@pytest.mark.parametrize("what", RESPONSES)
def test_responses_refuse_with_what_helps(sdks: Sdks, what: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": "Hi.", "stream": stream}
    with pytest.raises(openai.APIStatusError) as caught:
        sdks.gpt.responses.create(**(body | RESPONSES[what].body))
    is_told(caught.value, RESPONSES[what])


BAD = (anthropic.BadRequestError, "invalid_request_error")
MESSAGES: dict[str, tuple[dict[str, Any], type[anthropic.APIStatusError], str, str]] = {
    "an image that is none": (
        {"messages": messages_image("bm9uZQ==")},
        *BAD,
        "messages[0].content[1].source: An image is neither PNG",
    ),
    "no messages": ({"messages": []}, *BAD, "messages is empty"),
    "a role": ({"messages": [{"role": "wizard", "content": "x"}]}, *BAD, "messages[0].role"),
    "a limit": ({"max_tokens": -3}, *BAD, "max_tokens is -3"),
    "a required call without tools": ({"tool_choice": {"type": "any"}}, *BAD, "tool_choice"),
    "a prompt that is too long": ({"messages": LONG}, *BAD, "prompt is too long"),
    "a model": ({"model": "llama-99"}, anthropic.NotFoundError, "not_found_error", MODEL),
}


@STREAMED
@pytest.mark.parametrize("what", MESSAGES)
def test_messages_refuse_with_what_helps(sdks: Sdks, what: str, stream: bool) -> None:
    change, kind, name, says = MESSAGES[what]
    body: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 9, "stream": stream}
    with pytest.raises(anthropic.APIStatusError) as caught:
        sdks.claude.messages.create(**(body | change))
    error: Any = caught.value
    assert type(caught.value) is kind
    assert error.body["type"] == "error"
    assert error.type == error.body["error"]["type"] == name
    assert says in error.body["error"]["message"]
    assert error.request_id == error.body["request_id"]


def test_a_count_is_refused_as_the_message_would_be(sdks: Sdks) -> None:
    with pytest.raises(anthropic.BadRequestError, match="neither PNG"):
        sdks.claude.messages.count_tokens(model=MODEL, messages=messages_image("bm9uZQ=="))


def test_a_text_model_refuses_images_in_each_dialect(sdks: Sdks) -> None:
    says = rf"\[0\]\.content\[\d\].* is an image, and {MODEL} reads text only\. Remove the image"
    png = "data:image/png;base64,iVBORw0KGgo="
    parts: Any = [{"type": "image_url", "image_url": {"url": png}}]
    with pytest.raises(openai.BadRequestError, match=says) as chat:
        sdks.gpt.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": parts}])
    assert chat.value.code == "unsupported_content"
    items: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": png}]}]
    with pytest.raises(openai.BadRequestError, match=says):
        sdks.gpt.responses.create(model=MODEL, input=items)
    with pytest.raises(anthropic.BadRequestError, match=says):
        sdks.claude.messages.create(model=MODEL, messages=messages_image(), max_tokens=2)


def test_an_image_in_a_tools_result_is_left_out_with_a_word(sdks: Sdks) -> None:
    """No agent can take a result back: refused, it would end its session."""
    (message,) = messages_image()
    result = {"type": "tool_result", "tool_use_id": "a", "content": message["content"]}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    turns: list[Any] = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    sdks.claude.messages.create(model=MODEL, messages=turns, max_tokens=2)
    assert "[image omitted: this model reads text only]" in sdks.server.prompts()[-1]
