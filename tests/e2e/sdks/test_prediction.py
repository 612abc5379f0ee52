"""A prediction that is right saves forwards, one that is wrong costs none, and neither is read."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import Server

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
# The words that random weights may choose from: each is one token wherever it stands, so that what
# they say is read as the tokens that were sampled.
WORDS = (" the", " in", " nor", " and", " at", " but", " le", " when", " we", " are", " not")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.openai() as made:
        yield made


def favoured() -> dict[str, float]:
    """Return the logit biases that leave only WORDS to be sampled."""
    tokenizer = load_tokenizer(fixture_dir("qwen3"))
    pairs = [tokenizer.encode(word, add_special_tokens=False) for word in WORDS]
    assert all(len(ids) == 1 for ids in pairs)
    return {str(ids[0]): 100.0 for ids in pairs}


def answer(client: openai.OpenAI, prediction: str = "", **extra: Any) -> tuple[str, Any]:
    """Return what the model says, and its usage."""
    predicted: Any = {"prediction": {"type": "content", "content": prediction}}
    told = client.chat.completions.create(
        model="local",
        messages=HELLO,
        max_tokens=60,
        seed=7,
        logit_bias=favoured(),
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


def test_a_wrong_prediction_or_one_that_is_not_wanted_changes_no_word(
    client: openai.OpenAI,
) -> None:
    text, plain = answer(client)
    again, drafted = answer(client, " here was nothing of the sort" * 12)
    assert again == text, "and takes no forward more"
    assert drafted.speculation["decode_forwards"] <= plain.speculation["decode_forwards"]
    again, unwanted = answer(client, text, speculate=False)
    assert again == text and unwanted.speculation["decode_forwards"] == unwanted.completion_tokens
