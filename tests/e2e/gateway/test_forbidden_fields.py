"""No client can send a user's key elsewhere, or move a request: fields that LiteLLM acts on.

Each is sent at the top, in dictionaries, within messages and tools, as a header and in the query.
A sink must see no connection, and the cloud what it sees without them; or the answer is a 400.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.helpers.cloud.cloud_answers import HELLO
from tests.helpers.cloud.dialect_requests import PATHS, DialectAnswer, ask, body_of
from tests.helpers.cloud.gateway_server import GatewayServer, byte_sink
from tests.helpers.servers.mock_cloud import CloudRequest

THEIRS: Final = "sk-theirs-0815"
everywhere = pytest.mark.parametrize(
    ("dialect", "model"),
    [
        *((dialect, model) for dialect in list(PATHS)[:3] for model in ("cloud", "claude-cloud")),
        ("completions", "text-cloud"),
    ],
)
# Headers that differ from request to request, or that the transport writes.
VOLATILE: Final = {"content-length", "host", "x-request-id", "traceparent"}
# All names that LiteLLM takes for itself, as it lists them.
LITELLM_NAMES: Final = """
import json
from litellm.types.utils import all_litellm_params
print(json.dumps(sorted(all_litellm_params)))
"""
MORE_NAMES: Final = (  # that it or its proxy acts on, and does not list
    *("organization", "mock_testing_fallbacks", "mock_testing_rate_limit_error"),
    *("disable_fallbacks", "base_url", "default_fallbacks", "specific_deployment"),
    *("success_callback", "failure_callback", "timeout", "drop_params", "endpoint"),
    *("azure_endpoint", "arize_endpoint", "otel_endpoint", "webhook_url", "callback_url"),
    *("use_litellm_proxy", "aws_sts_endpoint", "force_timeout", "langfuse_host"),
    *("posthog_api_url", "api_key", "custom_llm_provider"),
)
HEADERS: Final = {
    **dict.fromkeys(("x-litellm-api-key", "x-goog-api-key", "api-key", "azure-api-key"), THEIRS),
    **dict.fromkeys(("ocp-apim-subscription-key", "helicone-auth", "x-mcp-auth"), THEIRS),
    **dict.fromkeys(("x-litellm-timeout", "x-litellm-stream-timeout"), "0.001"),
    **dict.fromkeys(("x-litellm-tags", "x-litellm-session-id", "x-litellm-trace-id"), "theirs"),
    **dict.fromkeys(("x-litellm-agent-id", "x-litellm-model-id", "openai-project"), "theirs"),
    **dict.fromkeys(("x-litellm-end-user-id", "langfuse_trace_id", "x-pass-x-theirs"), "theirs"),
    **dict.fromkeys(("langfuse_public_key", "openai-organization"), THEIRS),
    "x-litellm-num-retries": "3",
    "x-litellm-keepalive-seconds": "1",
    "x-litellm-disable-callbacks": "generic_api",
    "x-litellm-spend-logs-metadata": '{"theirs": 1}',
    "x-litellm-enable-message-redaction": "true",
    "x-pass-authorization": f"Bearer {THEIRS}",
    "langfuse_host": "http://127.0.0.1:9",
    "x-forwarded-for": "203.0.113.9",
    "cookie": f"token={THEIRS}",
}


@pytest.fixture(scope="module")
def sink() -> Iterator[str]:
    """Give an address that nobody may connect to."""
    with byte_sink() as (url, seen):
        yield url
        assert seen == []


@pytest.fixture(scope="module")
def names() -> list[str]:
    local = {name: "True" for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_BLOG_POSTS")}
    command = [sys.executable, "-W", "ignore", "-c", LITELLM_NAMES]
    told = subprocess.run(command, env=os.environ | local, capture_output=True, check=True)
    found = json.loads(told.stdout.splitlines()[-1])
    assert {"api_base", "api_key", "mock_response", "fallbacks"} <= set(found)
    return sorted({*found, *MORE_NAMES} - {"model", "messages", "metadata"})


def attacks(sink: str) -> dict[str, Any]:
    """Return fields that would move a request, spend money, or call somebody, in their types."""
    theirs = {"model": "openai/gpt-x", "api_base": f"{sink}/v1", "api_key": THEIRS}
    group = {"model_name": "cloud", "litellm_params": theirs}
    headers = {"authorization": f"Bearer {THEIRS}", "x-theirs": "1"}
    return {
        **dict.fromkeys(("api_base", "base_url", "endpoint", "azure_endpoint"), f"{sink}/v1"),
        **dict.fromkeys(("langfuse_host", "webhook_url", "callback_url"), sink),
        **dict.fromkeys(("timeout", "request_timeout", "stream_timeout", "force_timeout"), 0.001),
        **{name: ["langfuse"] for name in ("callbacks", "success_callback", "failure_callback")},
        **{name: ["spare"] for name in ("tags", "guardrails", "default_fallbacks")},
        **{f"{name}_fallbacks": [{"a": ["b"]}] for name in ("context_window", "content_policy")},
        **dict.fromkeys(("extra_headers", "headers"), headers),
        **dict.fromkeys(("num_retries", "max_retries", "rpm", "tpm", "cooldown_time"), 1),
        "api_key": THEIRS,
        "fallbacks": [theirs],
        "model_list": [group],
        "user_config": {"model_list": [group]},
        "litellm_params": theirs,
        "litellm_metadata": {"tags": ["free"], **theirs},
        "proxy_server_request": {"url": sink, "headers": {}, "body": theirs},
        "secret_fields": {"raw_headers": {"authorization": THEIRS}},
        "mock_response": "I am a mock.",
        "mock_tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}],
        "model_info": {"id": "theirs"},
        "custom_llm_provider": "anthropic",
        "additional_drop_params": ["messages"],
        "allowed_openai_params": ["api_base"],
        "extra_query": {"theirs": "1"},
        "provider_specific_header": {"custom_llm_provider": "openai", "extra_headers": headers},
        "cache": {"no-store": True},
        "prompt_variables": {"a": "b"},
        "max_budget": 0.0,
    }


def seen(requests: list[CloudRequest]) -> tuple[str, str, Any, dict[str, str]]:
    """Return path, query, body and lasting headers of the one request that a cloud has seen."""
    (request,) = requests
    headers = {name: each for name, each in request.headers.items() if name not in VOLATILE}
    return request.path, request.query, request.json, headers


class Target:
    """One dialect before one model; `plain` is what its cloud sees of a request without tricks."""

    def __init__(self, gateway: GatewayServer, dialect: str, model: str) -> None:
        self.gateway, self.dialect, self.model = gateway, dialect, model
        self.plain = seen(self.send()[1])

    def send(
        self, more: Any = None, headers: Any = None, query: str = ""
    ) -> tuple[DialectAnswer, list[CloudRequest]]:
        """Send a request; it is answered by the cloud, or a 400 that the cloud knows nothing of."""
        self.gateway.cloud.forget()
        body = body_of(self.dialect, self.model, "Hello there.") | (more or {})
        answer = ask(self.gateway.url, self.dialect, body, headers=headers, query=query)
        requests = self.gateway.cloud.generations()
        told = (400, "", 0) if answer.status == 400 else (200, HELLO.text, 1)
        assert (answer.status, answer.text, len(requests)) == told, answer.raw
        return answer, requests

    def held(self, more: Any = None, headers: Any = None, query: str = "") -> bool:
        """Say whether the cloud saw what it sees without `more`; else the answer is a 400."""
        _, requests = self.send(more, headers, query)
        assert not requests or seen(requests) == self.plain
        return bool(requests)

    def swept(self, fields: dict[str, Any]) -> set[str]:
        """Send all `fields` at once, and fewer where that is refused; return those refused."""
        if self.held(fields):
            return set()
        rows = list(fields.items())
        half = len(rows) // 2
        parts = (rows[:half], rows[half:]) if half else ()
        return set().union(*(self.swept(dict(part)) for part in parts)) if half else set(fields)


@pytest.fixture
def target(gateway: GatewayServer, dialect: str, model: str) -> Target:
    return Target(gateway, dialect, model)


@everywhere
def test_none_of_litellms_own_names_moves_a_request(
    target: Target, sink: str, names: list[str]
) -> None:
    refused = target.swept(attacks(sink))
    assert len(refused) < 12, "most are left out, as unknown fields always were"
    values: tuple[Any, ...] = (f"{sink}/v1", {"a": sink}, [sink], True, 0.001)
    for value in values:
        target.swept(dict.fromkeys(names, value))


@everywhere
@pytest.mark.parametrize("place", ["metadata", "extra_body", "extra_headers", "litellm_metadata"])
def test_no_field_in_a_dictionary_moves_a_request(target: Target, sink: str, place: str) -> None:
    """What of `metadata` is the user's own may pass, in the body alone."""
    _, requests = target.send({place: attacks(sink)})
    for path, query, body, headers in map(seen, [requests] if requests else []):
        if place == "metadata":
            body.pop("metadata", None)
        assert (path, query, body, headers) == target.plain


@everywhere
def test_no_field_within_a_message_or_a_tool_moves_a_request(target: Target, sink: str) -> None:
    fields, dialect = attacks(sink), target.dialect
    if dialect == "completions":
        target.held({"messages": [fields], "tools": [fields]})
        return
    words = "input_text" if dialect == "responses" else "text"
    part = {"type": words, "text": "Hello there.", **fields}
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    tool: dict[str, Any] = {
        "chat": {"type": "function", "function": {**function, **fields}},
        "messages": {"name": "f", "input_schema": function["parameters"]},
        "responses": {"type": "function", **function},
    }[dialect]
    field = "input" if dialect == "responses" else "messages"
    for more in (
        {field: [{"role": "user", "content": "Hello there.", **fields}]},
        {field: [{"role": "user", "content": [part]}]},
        {"tools": [{**tool, **fields}]},
    ):
        for request in target.send(more)[1]:
            told = f"{request.body.decode()} {request.headers}"
            assert THEIRS not in told and sink.rsplit(":", 1)[1] not in told


@everywhere
def test_no_header_and_no_query_moves_a_request(target: Target, sink: str) -> None:
    assert target.held(headers=HEADERS)
    for name, value in HEADERS.items():
        assert target.held(headers={name: value}), name
    target.held(query=f"?api_base={sink}/v1&api_key={THEIRS}&model=spare")
    target.held(query="?mock_response=x&timeout=0.001&fallbacks=spare&user_config=x")


def test_a_models_name_cannot_name_a_provider(gateway: GatewayServer, sink: str) -> None:
    """Only names of the config reach it: else a client could pick any provider's host."""
    for name in (
        *("openai/gpt-4o", "anthropic/claude-3", "groq/x", "custom_openai/x", "ollama/x"),
        *("vertex_ai/x", "azure/x", f"openai/{sink}", "hearth/local", "cloud,spare"),
        *("*", "gpt-mock", "openai/*", "openai/gpt-mock", "anthropic/flaky"),
    ):
        for dialect in PATHS:
            answer = ask(gateway.url, dialect, body_of(dialect, name, "n=1"))
            assert answer.status in (200, 400, 404), answer.raw
            assert answer.status != 200 or answer.served_by == "hearth/local", (name, dialect)
    assert gateway.cloud.generations() == []


def test_a_fallback_does_not_carry_them_either(gateway: GatewayServer, sink: str) -> None:
    for dialect in list(PATHS)[:3]:
        body, sent = body_of(dialect, "local-first", "n=2 full=0"), []
        for more, headers in (({}, {}), (attacks(sink), HEADERS)):
            gateway.cloud.forget()
            answer = ask(gateway.url, dialect, {**more, **body}, headers=headers)
            sent.append([request.json for request in gateway.cloud.generations()])
            assert answer.text == HELLO.text or (more and answer.status == 400), answer.raw
        assert sent[1] in ([], sent[0])
