"""Random and wrong bodies: always a 4xx (or an answer), never a 5xx, and the worker lives on."""

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.helpers.servers.server import Server

PATHS = {
    "/v1/chat/completions": {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]},
    "/v1/messages": {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"max_output_tokens": 16, "input": "x"},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "function", "x"])
CONTENT = JSON | st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url", "tool_result", "x"])}),
    max_size=2,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": ROLES | JSON,
        "content": CONTENT,
        "tool_calls": JSON | st.lists(st.fixed_dictionaries({"id": JSON, "function": JSON})),
        "tool_call_id": JSON,
        "type": st.sampled_from(["message", "function_call", "reasoning"]),
    },
)
FIELDS = [
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "stop", "stop_sequences", "max_tokens", "max_output_tokens"),
    *("max_completion_tokens", "logit_bias", "logprobs", "top_logprobs", "n", "stream"),
    *("stream_options", "tools", "tool_choice", "response_format", "thinking", "system"),
    *("instructions", "previous_response_id", "metadata", "user", "model", "mock_response"),
    *("api_base", "fallbacks", "timeout", "num_retries", "tags", "chat_template_kwargs"),
    *("enable_thinking", "reasoning", "reasoning_effort", "text", "store", "include"),
]
CHANGES = st.dictionaries(
    st.sampled_from(FIELDS), JSON | st.integers(-3, 3) | st.floats(-3, 3), max_size=3
)


def post(server: Server, path: str, payload: bytes) -> tuple[int, bytes]:
    request = urllib.request.Request(
        server.url + path, payload, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def assert_in_dialect(path: str, status: int, answer: bytes) -> None:
    """A refusal has the shape that the path's clients parse, with a text in it."""
    assert 400 <= status < 500, (status, answer[:500])
    error = json.loads(answer)
    if path == "/v1/messages":
        assert error["type"] == "error" and error["error"]["type"]
    assert isinstance(error["error"]["message"], str) and error["error"]["message"]


@given(
    path=st.sampled_from(sorted(PATHS)),
    changes=CHANGES,
    messages=st.none() | JSON | st.lists(MESSAGE, max_size=3),
)
@settings(
    max_examples=200,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_body_makes_a_5xx(
    server: Server, path: str, changes: dict[str, Any], messages: Any
) -> None:
    body: dict[str, Any] = {"model": "local", **PATHS[path]}
    if messages is not None:
        body["input" if path == "/v1/responses" else "messages"] = messages
    body |= changes
    status, answer = post(server, path, json.dumps(body).encode())
    if status != 200:
        assert_in_dialect(path, status, answer)


DEEP = b'{"model":"local","max_tokens":2,"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
BASE = b'{"model":"local","max_tokens":2,"messages":[{"role":"user","content":"x"}],'
RAW = {
    "not JSON": b"{",
    "empty": b"",
    "not an object": b"[1]",
    "not UTF-8": b'{"model": "\xff"}',
    "deep": DEEP,
    "big integer": BASE + b'"seed":' + b"9" * 40 + b"}",
    "NaN temperature": BASE + b'"temperature":NaN}',
    "minus nine tokens": BASE.replace(b":2,", b":-9,") + b'"top_p":1}',
}
TOOLS = {
    "/v1/chat/completions": b'{"type":"function","function":{"name":"f","parameters":%s}}',
    "/v1/messages": b'{"name":"f","input_schema":%s}',
    "/v1/responses": b'{"type":"function","name":"f","parameters":%s}',
}
SCHEMAS = {
    "tool schema not an object": b"7",
    "big integer in a schema": b'{"type":"object","maximum":99999999999999999999}',
}


@pytest.mark.parametrize("path", sorted(PATHS))
@pytest.mark.parametrize("name", [*RAW, *SCHEMAS])
def test_a_broken_body_is_a_4xx_that_helps(server: Server, path: str, name: str) -> None:
    if name in SCHEMAS:
        payload = BASE + b'"tools":[' + TOOLS[path] % SCHEMAS[name] + b"]}"
    else:
        payload = RAW[name]
    if path == "/v1/responses":
        payload = payload.replace(b'"max_tokens"', b'"max_output_tokens"').replace(
            b'"messages"', b'"input"'
        )
        if name == "big integer":  # Responses has no seed; metadata is as good a place
            payload = payload.replace(b'"seed"', b'"metadata"')
    status, answer = post(server, path, payload)
    assert_in_dialect(path, status, answer)


def test_the_worker_outlived_all_of_it(server: Server) -> None:
    worker = server.worker()
    assert (worker["state"], worker["restarts"]) == ("ready", 0)
    body = {"model": "local", **PATHS["/v1/chat/completions"]}
    assert post(server, "/v1/chat/completions", json.dumps(body).encode())[0] == 200
