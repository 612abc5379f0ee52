"""Random and wrong bodies: always a 4xx (or an answer), never a 5xx, and the worker lives on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from tests.helpers.servers.audited_server import GENERATE, body_of
from tests.helpers.servers.server import Server

PATHS = [path for path in GENERATE if path != "/v1/completions"]
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


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@given(
    path=st.sampled_from(PATHS),
    changes=CHANGES,
    messages=st.none() | JSON | st.lists(MESSAGE, max_size=3),
)
@example("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, 7)
@example("/v1/messages", {"tools": [{"name": "f", "input_schema": {"maximum": 10**20}}]}, None)
@example("/v1/responses", {"metadata": 10**40, "temperature": float("nan")}, None)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_body_makes_a_5xx(
    server: Server, http: httpx.Client, path: str, changes: dict[str, Any], messages: Any
) -> None:
    before = server.worker()
    body = body_of(path, "x") | ({} if messages is None else {GENERATE[path]: messages}) | changes
    answer = http.post(path, content=json.dumps(body))
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:  # in the shape that the path's clients parse
        error = answer.json()
        assert (error.get("type") == "error") is (path == "/v1/messages")
        assert isinstance(error["error"]["message"], str) and error["error"]["message"]
    worker = server.worker()
    assert (worker["state"], worker["pid"]) == ("ready", before["pid"])
