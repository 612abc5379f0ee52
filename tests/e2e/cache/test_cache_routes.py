"""Checks that each dialect's usage and the cache routes report what was kept of a prompt."""

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import Server

KEY = "k"
CHAT = "/v1/chat/completions"
LONG: list[Any] = [
    {"role": "system", "content": "You are careful. " + "Read what you are given twice. " * 60},
    {"role": "user", "content": "Here is a file. " + "The quick brown fox jumps over it. " * 60},
]


@pytest.fixture(scope="module")
def debug() -> Iterator[Server]:
    made = Server(
        MODEL_PATH=str(fixture_dir("qwen3")),
        PROXY_MODEL_ID="local",
        LOG_PROMPTS="true",
        PROXY_API_KEY=KEY,
    )
    with made as running:
        yield running


@pytest.fixture
def http(debug: Server) -> Iterator[httpx.Client]:
    """A client with the key, before an empty cache."""
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=debug.url, headers=headers, timeout=60) as client:
        assert client.delete("/v1/cache").status_code == 200
        yield client


def chat(http: httpx.Client) -> httpx.Response:
    body = {"model": "local", "messages": LONG, "max_tokens": 4, "temperature": 0}
    return http.post(CHAT, json=body).raise_for_status()


def usage_of(answer: httpx.Response) -> dict[str, Any]:
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def cached_of(answer: httpx.Response) -> int:
    cached: int = usage_of(answer)["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_a_prompt_sent_again_is_kept_and_shown_until_it_is_deleted(http: httpx.Client) -> None:
    first, second = chat(http), chat(http)
    size = usage_of(first)["prompt_tokens"]
    assert cached_of(first) == 0
    assert 0.9 * size < cached_of(second) < size
    told = http.get("/v1/cache").json()
    (row,) = told["workers"]
    assert (told["object"], row["worker"]) == ("cache", 0)
    assert row["bytes"] + row["slots_bytes"] > 0
    assert max(entry["tokens"] for entry in row["entries"]) > 0.9 * size
    (emptied,) = http.delete("/v1/cache").json()["workers"]
    assert (emptied["bytes"], emptied["entries"]) == (0, [])
    assert cached_of(chat(http)) == 0


def test_a_connection_dropped_at_40_percent_of_a_prefill_loses_nothing(
    debug: Server, http: httpx.Client
) -> None:
    text = "".join(f"{n} tell me what this line says, and the next one too. " for n in range(400))
    body = {"model": "local", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    payload = json.dumps(body | {"temperature": 0}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{debug.port}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    reached = 0
    with socket.create_connection(("127.0.0.1", debug.port), timeout=10) as connection:
        connection.sendall(head.encode() + payload)
        while reached < 2400:
            (row,) = http.get("/v1/cache").json()["workers"]
            reached = max((slot["tokens"] for slot in row["slots"]), default=0)
    answer = http.post(CHAT, content=payload, headers={"content-type": "application/json"})
    size = usage_of(answer)["prompt_tokens"]
    assert size > 4500, "the connection was dropped amid the prefill"
    assert cached_of(answer) >= reached


def test_the_ids_of_a_prompt_are_told_under_the_answers_request_id(http: httpx.Client) -> None:
    answer = chat(http)
    request_id = answer.headers["x-request-id"]
    assert answer.json()["id"] == f"chatcmpl-{request_id}"
    told = http.get(f"/v1/cache/prompts/{request_id}").json()
    assert told["request_id"] == request_id
    assert len(told["ids"]) == usage_of(answer)["prompt_tokens"]
    assert all(type(token) is int for token in told["ids"])
    missing = http.get("/v1/cache/prompts/no-such-request")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


# ---------------------------------------------------------------- the figure in each dialect


def streamed_chat(http: httpx.Client, url: str) -> tuple[int, int, Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(
                model="local",
                messages=LONG,
                max_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    (usage,) = [chunk.usage for chunk in chunks if chunk.usage]
    assert usage.prompt_tokens_details is not None
    fields = [getattr(c.choices[0].delta, "provider_specific_fields", None) for c in chunks[:-1]]
    (kv_cache,) = [row["kv_cache"] for row in fields if row]
    assert usage.kv_cache == kv_cache  # with the usage too, where it was asked for
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, kv_cache


def whole_chat(http: httpx.Client, url: str) -> tuple[int, int, Any]:
    usage = usage_of(answer := chat(http))
    return usage["prompt_tokens"], cached_of(answer), usage["kv_cache"]


def messages_usage(usage: dict[str, Any]) -> tuple[int, int, Any]:
    cached, created = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    return usage["input_tokens"] + cached + created, cached, usage.get("kv_cache")


def message_body() -> dict[str, Any]:
    system, user = LONG
    return {"model": "local", "max_tokens": 4, "system": system["content"], "messages": [user]}


def streamed_message(http: httpx.Client, url: str) -> tuple[int, int, Any]:
    with (
        anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client,
        client.messages.stream(**message_body()) as stream,
    ):
        events = [event.model_dump() for event in stream]
        final = stream.get_final_message().usage.model_dump()
    (start,) = [event["message"]["usage"] for event in events if event["type"] == "message_start"]
    (end,) = [event["usage"] for event in events if event["type"] == "message_delta"]
    # nobody else is there: what was kept at arrival is what is used
    assert messages_usage(start)[:2] == messages_usage(end)[:2] == messages_usage(final)[:2]
    return messages_usage(end)


def whole_message(http: httpx.Client, url: str) -> tuple[int, int, Any]:
    return messages_usage(usage_of(http.post("/v1/messages", json=message_body())))


def response_body() -> dict[str, Any]:
    return {"model": "local", "input": LONG, "max_output_tokens": 4}


def response_usage(usage: dict[str, Any]) -> tuple[int, int, Any]:
    cached = usage["input_tokens_details"]["cached_tokens"]
    return usage["input_tokens"], cached, usage["kv_cache"]


def streamed_response(http: httpx.Client, url: str) -> tuple[int, int, Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        *_, last = client.responses.create(**response_body(), stream=True)
    assert last.type == "response.incomplete"
    assert last.response.usage is not None
    return response_usage(last.response.usage.model_dump())


def whole_response(http: httpx.Client, url: str) -> tuple[int, int, Any]:
    return response_usage(usage_of(http.post("/v1/responses", json=response_body())))


@pytest.mark.parametrize(
    "read",
    [
        whole_chat,
        streamed_chat,
        whole_message,
        streamed_message,
        whole_response,
        streamed_response,
    ],
)
def test_every_dialect_tells_what_was_kept(
    debug: Server, http: httpx.Client, read: Callable[..., tuple[int, int, Any]]
) -> None:
    cold_size, cold_cached, cold = read(http, debug.url)
    size, cached, warm = read(http, debug.url)
    assert cold_size == size == usage_of(chat(http))["prompt_tokens"]
    assert cold_cached == 0
    assert 0.9 * size < cached < size
    assert all(row.pop("ttft_ms") >= 0 for row in (cold, warm))
    nothing = {"cache_hit": False, "prefix_length": 0, "prefilled": size, "source": "none"}
    lengths = ("canonical_length", "matched_length")
    told = {"divergence": None, "idle_tokens": 0}
    assert cold == {**nothing, **dict.fromkeys(lengths, 0), **told, "match": "miss"}
    found = {"cache_hit": True, "prefix_length": cached, "prefilled": size - cached}
    assert warm.pop("source") in ("slot", "ram")
    assert cached <= warm.pop("matched_length") <= size and warm.pop("canonical_length") == cached
    assert warm == {**found, **told, "match": "exact"}
