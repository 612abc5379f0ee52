"""A wish about thinking that has no effect is told in every dialect, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.servers.server import Server

HI = [{"role": "user", "content": "Hello"}]
WISHES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": HI, "reasoning_effort": "max", "stream_options": {"include_usage": True}},
    ),
    "messages": (
        "/v1/messages",
        {"messages": HI, "thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
    ),
    "responses": ("/v1/responses", {"input": "Hello", "reasoning": {"effort": "max"}}),
    "ollama chat": ("/api/chat", {"messages": HI, "think": "max"}),
    "ollama generate": ("/api/generate", {"prompt": "Hello", "think": "max"}),
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with Server() as running, httpx.Client(base_url=running.url, timeout=60) as told:
        yield told


def warnings_in(value: Any) -> list[str]:
    """Return the last `warnings` anywhere in JSON."""
    if isinstance(value, dict) and value.get("warnings"):
        return [str(each) for each in value["warnings"]]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for each in inner if (found := warnings_in(each))), [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WISHES)
def test_a_level_that_the_template_has_not_is_told(
    client: httpx.Client, name: str, stream: bool
) -> None:
    path, body = WISHES[name]
    if not stream:
        body = {key: value for key, value in body.items() if key != "stream_options"}
    tokens = {"max_tokens": 8, "max_output_tokens": 16, "options": {"num_predict": 8}}
    body = body | {"model": "local", "stream": stream} | tokens
    text = client.post(path, json=body).raise_for_status().text
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    rows = [json.loads(line) for line in lines if line.startswith("{")] if stream else [text]
    found = [warnings_in(row if stream else json.loads(text)) for row in rows]
    (warning,) = next(each for each in reversed(found) if each)
    assert 'The level "max" changes nothing' in warning


def test_the_list_of_models_tells_the_switch_and_a_wish_that_is_met_has_no_warning(
    client: httpx.Client,
) -> None:
    (row, *_) = client.get("/v1/models").raise_for_status().json()["data"]
    assert row["thinking"] == {"default": "on", "switch": True, "levels": []}
    for more in ({}, {"enable_thinking": False}, {"chat_template_kwargs": {"thinking": True}}):
        body = {"model": "local", "messages": HI, "max_tokens": 4} | more
        told = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        assert "kv_cache" in told["usage"]
        assert "warnings" not in told["usage"]
