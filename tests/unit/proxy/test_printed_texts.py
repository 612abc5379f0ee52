"""Checks the proxy's start-up texts, its refusals to start, and the texts of its errors."""

import json

import pytest

from hearth.proxy.api.chat_completions.errors import openai_error
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.api.error_texts import error_headers
from hearth.proxy.api.messages.errors import anthropic_error
from hearth.proxy.main import bind, bind_all
from hearth.proxy.request.model_names import ModelNames
from hearth.proxy.request.parsed_request import Dialect
from hearth.proxy.startup_banner import ready_lines, starting_line
from hearth.shared.errors import Overloaded, PromptTooLong, RequestError, StartError, WorkerLost
from hearth.shared.settings import load_settings
from hearth.shared.wire_messages import ModelFacts

FACTS = ModelFacts("local", "p", "qwen3", 32_768, 10, 27_400_000, 5_480, "4 x KVCache", "cpu")


def test_ready_says_what_is_served_and_how_to_ask_for_it() -> None:
    text = "\n".join(ready_lines(load_settings({}, None), FACTS))
    assert text.startswith("ready: http://127.0.0.1:4000\n")
    assert "\n  talk     http://127.0.0.1:4000/ in a browser\n" in text
    assert "\n  see      http://127.0.0.1:4000/dashboard\n" in text
    for part in ("local", "qwen3", "27.4 M parameters", "5.48 kB", "32,768", "4 x KVCache", "cpu"):
        assert part in text
    assert "Authorization" not in text
    keyed = "\n".join(ready_lines(load_settings({"PROXY_API_KEY": "secret"}, None), FACTS))
    assert "$PROXY_API_KEY" in keyed
    assert "secret" not in keyed


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:4000"),
        ("::", "http://[::1]:4000"),
        ("::1", "http://[::1]:4000"),
        ("localhost", "http://localhost:4000"),
    ],
)
def test_the_url_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    settings = load_settings({"PROXY_HOST": host, "PROXY_API_KEY": "k"}, None)
    assert ready_lines(settings, FACTS)[0] == f"ready: {url}"


def test_a_name_that_no_header_can_carry_refuses_to_start() -> None:
    with pytest.raises(StartError, match="PROXY_MODEL_ID"):
        ModelNames.of(load_settings({"PROXY_MODEL_ID": "模型"}, None))


@pytest.mark.process
def test_a_port_in_use_is_refused_and_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=str(port)):
            bind_all("localhost", port)


def test_errors_keep_their_code_and_say_when_to_come_back() -> None:
    long = PromptTooLong(tokens=10, tokens_max=8)
    assert openai_error(long)["code"] == "context_length_exceeded"
    assert openai_error(long)["type"] == "invalid_request_error"
    assert anthropic_error(long)["message"].startswith("prompt is too long")
    place = "messages[3].content[1].content[0].source"
    image = anthropic_error(RequestError(f"{place}: It is half.", code="image_broken"))["message"]
    named = "messages.3.content.1.tool_result.content.0.image"
    assert image == f"{named}: Could not process image: {place}: It is half."
    assert anthropic_error(Overloaded("busy"))["type"] == "overloaded_error"
    assert anthropic_error(WorkerLost("gone"))["type"] == "api_error"
    assert anthropic_error(RequestError("big", status=413))["type"] == "request_too_large"
    assert error_headers(Overloaded("busy")) == [(b"retry-after", b"5")]
    assert error_headers(long) == []


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages", "ollama_chat"])
def test_a_prompt_that_is_too_long_is_told_in_the_words_that_each_reader_acts_on(
    dialect: Dialect,
) -> None:
    """Claude Code compacts on some of them; LiteLLM asks another model on the last ones, on which
    Pi, opencode and OpenClaw compact behind one."""
    long = PromptTooLong(tokens=180_008, tokens_max=131_071)
    text = json.dumps(DIALECTS[dialect].error_body(long, "id"))
    assert "The prompt is 180,008 tokens and this server accepts 131,071. Remove at least" in text
    assert text.count("exceeds the available context size") == 1
    assert ("prompt is too long: " in text) == (dialect == "messages")
    told = RequestError("It exceeds the available context size.", code=long.code)
    assert openai_error(told)["message"] == str(told)
    assert openai_error(RequestError("Bad."))["message"] == "Bad."


def test_a_start_without_the_default_model_says_the_remedy_and_what_is_served() -> None:
    settings = load_settings({"MODELS": "b=owner/b"}, None)
    assert starting_line(settings, "1", "why") == "hearth 1: starting without builtin:smollm2 ..."
    text = "\n".join(ready_lines(settings, None, "It is missing: hearth pull smollm2."))
    assert text.startswith("ready: http://127.0.0.1:4000\n")
    assert "\n  missing  It is missing: hearth pull smollm2. The next request loads it" in text
    assert "\n  others   b (loaded when they are asked for)\n" in text
    assert '"model": "smollm2"' in text
    assert "context" not in text
