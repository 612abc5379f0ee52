"""builtin:pocket as a newcomer meets it: it greets, uses a tool, thinks when asked to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from hearth.worker.engine.model_loader import POCKET_DIR
from tests.helpers.servers.server import Server

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "check_weather",
        "description": "Check the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with Server() as running, running.openai() as told:
        yield told


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    answer = client.chat.completions.create(
        model="pocket", messages=messages, temperature=0, **more
    )
    return answer.choices[0]


def test_a_first_hello_is_answered_in_a_stream(client: openai.OpenAI) -> None:
    hello: Any = [{"role": "user", "content": "Hello"}]
    with client.chat.completions.create(model="pocket", messages=hello, stream=True) as stream:
        pieces = [row.choices[0].delta.content or "" for row in stream if row.choices]
    assert any(pieces), "in however few pieces a busy machine makes of it"
    assert "I am Pocket" in "".join(pieces)


def test_a_newcomer_is_answered_as_the_server_is_set_up(client: openai.OpenAI) -> None:
    """With the default temperature and thinking. A hundred openings are in test_pocket_skills."""
    talk: list[Any] = []
    for said, wanted in (
        ("My cat is called Whiskers.", "Whiskers"),
        ("Thanks! Who are you?", "I am Pocket"),
        ("And what is my cat called?", "Whiskers"),
        ("What is the capital of France?", "I know nothing of the world"),
    ):
        talk.append({"role": "user", "content": said})
        answer = client.chat.completions.create(model="pocket", messages=talk).choices[0].message
        assert wanted in (answer.content or ""), (said, answer.content)
        talk.append({"role": "assistant", "content": answer.content})


def test_it_uses_a_tool_and_tells_what_came_of_it(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Check the weather with city Lisbon."}]
    called = ask(client, messages, tools=[WEATHER])
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert call.function.name == "check_weather"
    assert json.loads(call.function.arguments) == {"city": "Lisbon"}
    messages += [
        called.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "The temperature is 17."},
    ]
    answer = ask(client, messages, tools=[WEATHER])
    assert answer.finish_reason == "stop"
    assert "17" in answer.message.content


@pytest.mark.parametrize("thinks", [True, False])
def test_it_thinks_when_asked_to(client: openai.OpenAI, thinks: bool) -> None:
    messages = [
        {"role": "user", "content": "The code of the vault is 4417."},
        {"role": "assistant", "content": "I will remember: The code of the vault is 4417."},
        {"role": "user", "content": "What is the code of the vault?"},
    ]
    answer = ask(client, messages, extra_body={"enable_thinking": thinks})
    assert "4417" in answer.message.content
    thought = getattr(answer.message, "reasoning_content", None) or ""
    assert ("4417" in thought) == thinks


def test_its_files_are_those_that_mlx_lm_wants() -> None:
    names = {file.name for file in Path(POCKET_DIR).iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
