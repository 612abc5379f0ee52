"""A prediction that is right saves forwards, one that is wrong costs none, and neither is read."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.servers.server import Server

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with Server(MODEL_PATH="builtin:pocket") as server, server.openai() as made:
        yield made


def answer(client: openai.OpenAI, prediction: str = "", **extra: Any) -> tuple[str, Any]:
    """Return what the model says, and its usage."""
    predicted: Any = {"prediction": {"type": "content", "content": prediction}}
    told = client.chat.completions.create(
        model="pocket",
        messages=HELLO,
        max_tokens=60,
        seed=7,
        extra_body={"enable_thinking": False, "use_kv_cache": False} | extra,
        **(predicted if prediction else {}),
    )
    return told.choices[0].message.content or "", told.usage


def test_a_right_prediction_saves_forwards_and_changes_no_word(client: openai.OpenAI) -> None:
    text, plain = answer(client)
    again, drafted = answer(client, text)
    assert again == text and drafted.completion_tokens == plain.completion_tokens > 30
    assert drafted.prompt_tokens == plain.prompt_tokens, "it is no part of the prompt"
    details = drafted.completion_tokens_details
    assert drafted.speculation["decode_forwards"] <= 0.5 * plain.speculation["decode_forwards"]
    forwards = drafted.completion_tokens - details.accepted_prediction_tokens
    assert drafted.speculation["decode_forwards"] == forwards


def test_a_wrong_prediction_changes_no_word_and_takes_no_forward_more(
    client: openai.OpenAI,
) -> None:
    text, plain = answer(client)
    again, drafted = answer(client, " ".join(reversed(text.split())))
    assert again == text
    assert drafted.speculation["decode_forwards"] <= plain.speculation["decode_forwards"]


def test_a_request_that_wants_no_drafts_gets_none(client: openai.OpenAI) -> None:
    text, _ = answer(client)
    again, usage = answer(client, text, speculate=False)
    details = usage.completion_tokens_details
    assert again == text
    told = (details.accepted_prediction_tokens, details.rejected_prediction_tokens)
    assert told == (0, 0) and usage.speculation["decode_forwards"] == usage.completion_tokens
