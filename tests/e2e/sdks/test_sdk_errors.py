"""Checks that refusals reach the SDKs as their own exceptions, with code, field and remedy."""

from typing import Any, Final

import anthropic
import openai
import pytest

from tests.helpers.cases import cases
from tests.helpers.clients.run_clients import MODEL
from tests.helpers.clients.sdk_conversations import Sdks

STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
HI: Final[list[Any]] = [{"role": "user", "content": "Hi."}]
BASES: Final[dict[str, dict[str, Any]]] = {
    "chat": {"messages": HI},
    "messages": {"messages": HI, "max_tokens": 9},
    "responses": {"input": "Hi."},
}


def error_of(sdks: Sdks, dialect: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """Return the status and the error that the dialect's SDK raises for `body`."""
    ask: Any = {
        "chat": sdks.gpt.chat.completions.create,
        "messages": sdks.claude.messages.create,
        "responses": sdks.gpt.responses.create,
    }[dialect]
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        ask(**{"model": MODEL, **BASES[dialect], **body})
    error: Any = caught.value
    assert error.request_id, "it is in the log under this"
    told: dict[str, Any] = error.body.get("error", error.body)
    return error.status_code, told


@STREAMED
@pytest.mark.parametrize("case", cases("api/sdk_refusals.yaml"))
def test_a_refusal_helps(sdks: Sdks, case: dict[str, Any], stream: bool) -> None:
    status, told = error_of(sdks, case["dialect"], stream=stream, **case["body"])
    assert status == case.get("status", 400)
    assert told == told | {"type": "invalid_request_error"} | case.get("error", {})
    assert case["says"] in told["message"]


@pytest.mark.parametrize(
    ("dialect", "place", "says"),
    [
        ("chat", "messages", "131,07"),
        ("messages", "messages", "prompt is too long"),
        ("responses", "input", "131,07"),
    ],
)
def test_a_prompt_that_is_too_long_says_by_how_much(
    dialect: str, place: str, says: str, sdks: Sdks
) -> None:
    long = [{"role": "user", "content": "word " * 200_000}]
    status, told = error_of(sdks, dialect, **{place: long})
    assert status == 400 and says in told["message"]
    assert told.get("code", "context_length_exceeded") == "context_length_exceeded"


def shown(data: str) -> list[Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return [{"type": "image", "source": source}]


def test_a_count_is_refused_as_the_message_would_be(sdks: Sdks) -> None:
    messages: Any = [{"role": "user", "content": shown("bm9uZQ==")}]
    with pytest.raises(anthropic.BadRequestError, match="neither PNG"):
        sdks.claude.messages.count_tokens(model=MODEL, messages=messages)


def test_an_image_in_a_tools_result_is_left_out_with_a_word(sdks: Sdks) -> None:
    """No agent can take a result back: refused, it would end its session."""
    result = {"type": "tool_result", "tool_use_id": "a", "content": shown("iVBORw0KGgo=")}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    turns: list[Any] = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    sdks.claude.messages.create(model=MODEL, messages=turns, max_tokens=2)
    assert "[image omitted: this model reads text only]" in sdks.server.prompts()[-1]
