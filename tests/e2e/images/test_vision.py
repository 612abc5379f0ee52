"""Sends images through the whole server with the official SDKs, by the specification's checklist.

Weights are random, so that an image is understood is shown by answers that depend on it and that
mlx-vlm's own (tests/property/warm/test_vision_warm.py) equals; here it is what clients see.
"""

import base64
import io
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.image_files import painted
from tests.helpers.servers.server import Server

MODEL = "local"
SYSTEM = "You look at pictures and say what they show. " * 30
SIZE = (224, 160)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A hybrid that sees: all four kinds are in the property tests."""
    made = Server(
        MODEL_PATH=str(fixture_dir("qwen3_5_vl")),
        PROXY_MODEL_ID=MODEL,
        DEFAULT_TEMPERATURE="0",
        DEFAULT_REPETITION_PENALTY="1",
    )
    with made as running:
        yield running


@pytest.fixture
def gpt(server: Server) -> Iterator[openai.OpenAI]:
    server.forget()
    with server.openai() as client:
        yield client


def encoded(number: int) -> str:
    """Return an image file in base64."""
    file = io.BytesIO()
    painted(number, SIZE).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def url(number: int) -> str:
    return f"data:image/png;base64,{encoded(number)}"


def shown(*parts: int | str) -> dict[str, Any]:
    """Return a user's message of images, by number, and words."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return {"role": "user", "content": content}


class Talk:
    """One chat conversation."""

    def __init__(self, gpt: openai.OpenAI, server: Server) -> None:
        self._gpt = gpt
        self._server = server
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        self.usage: Any = None

    def ask(self, message: dict[str, Any], keep: bool = True) -> str:
        answer = self._gpt.chat.completions.create(
            model=MODEL,
            messages=[*self.messages, message],
            max_tokens=12,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        said = answer.choices[0].message
        self.usage = answer.usage
        if keep:
            self.messages += [message, said.model_dump(exclude_none=True)]
        return said.content or said.model_dump().get("reasoning_content") or ""

    @property
    def cached(self) -> int:
        return int(self.usage.prompt_tokens_details.cached_tokens)

    @property
    def image_tokens(self) -> int:
        return int(self.usage.prompt_tokens_details.image_tokens)


@pytest.fixture
def talk(gpt: openai.OpenAI, server: Server) -> Talk:
    return Talk(gpt, server)


def vision(server: Server) -> dict[str, Any]:
    (worker,) = server.get("/v1/cache")["workers"]
    return dict(worker["vision"])


def calls(server: Server) -> int:
    return int(vision(server)["encoder_calls"])


def test_an_image_and_words_both_contribute_to_the_answer(talk: Talk, server: Server) -> None:
    before = calls(server)
    first = talk.ask(shown(1, "What is this?"), keep=False)
    assert first and talk.image_tokens > 0
    assert calls(server) == before + 1
    assert talk.ask(shown(2, "What is this?"), keep=False) != first
    assert talk.ask(shown(1, "Where was it made?"), keep=False) != first
    assert talk.ask(shown("What is this?"), keep=False) != first
    assert talk.ask(shown(1, "What is this?"), keep=False) == first


def test_turns_behind_an_image_call_no_encoder_and_read_only_what_is_new(
    talk: Talk, server: Server
) -> None:
    talk.ask(shown(1, "What is this?"))
    made, prompt = calls(server), talk.usage.prompt_tokens
    for words in ("And this?", "Say more.", "Thanks."):
        answered = talk.usage.completion_tokens
        talk.ask({"role": "user", "content": words})
        assert calls(server) == made
        assert talk.cached >= prompt - 1, "the image and all before it"
        assert talk.cached >= 0.94 * (prompt + answered)
        prompt = talk.usage.prompt_tokens


def test_messages_and_responses_show_images_too(gpt: openai.OpenAI, server: Server) -> None:
    before = calls(server)
    source = {"type": "base64", "media_type": "image/png", "data": encoded(6)}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    asked: Any = [{"role": "user", "content": content}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        said = claude.messages.create(model=MODEL, max_tokens=8, system=SYSTEM, messages=asked)
        echoed: Any = {"role": "assistant", "content": said.content}
        more: Any = [*asked, echoed, {"role": "user", "content": "Say more."}]
        second = claude.messages.create(model=MODEL, max_tokens=8, system=SYSTEM, messages=more)
        count = claude.messages.count_tokens(model=MODEL, system=SYSTEM, messages=asked)
    total = said.usage.input_tokens + (said.usage.cache_creation_input_tokens or 0)
    assert count.input_tokens == total + (said.usage.cache_read_input_tokens or 0)
    assert (second.usage.cache_read_input_tokens or 0) >= 0.94 * count.input_tokens
    parts: Any = [
        {"type": "input_image", "image_url": url(6)},
        {"type": "input_text", "text": "What is this?"},
    ]
    first = gpt.responses.create(
        model=MODEL,
        instructions=SYSTEM,
        input=[{"role": "user", "content": parts}],
        max_output_tokens=8,
    )
    assert first.usage is not None and first.usage.input_tokens == count.input_tokens
    later = gpt.responses.create(
        model=MODEL,
        instructions=SYSTEM,
        input="Say more.",
        previous_response_id=first.id,
        max_output_tokens=8,
    )
    assert later.usage is not None
    assert later.usage.input_tokens_details.cached_tokens >= 0.94 * first.usage.input_tokens
    assert calls(server) == before + 1, "one image, read once"
