"""No client can send a user's key elsewhere, or move a request: fields that LiteLLM acts on.

Each is sent at the top, in `metadata`, in `extra_body`, within messages and tools, as a header and
in the query. A sink must see no byte, and the cloud what it sees without them; or the answer is a
400.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.helpers.cloud.byte_sink import ByteSink
from tests.helpers.cloud.cloud_answers import HELLO
from tests.helpers.cloud.dialect_requests import PATHS, DialectAnswer, ask, body_of
from tests.helpers.cloud.gateway_server import GatewayServer
from tests.helpers.servers.mock_cloud import CloudRequest, MockCloud

THEIRS: Final = "sk-theirs-0815"
TARGETS: Final = [
    pytest.param("chat", "cloud", id="chat"),
    pytest.param("chat", "claude-cloud", id="chat-anthropic"),
    pytest.param("messages", "claude-cloud", id="messages"),
    pytest.param("messages", "cloud", id="messages-openai"),
    pytest.param("responses", "cloud", id="responses"),
    pytest.param("responses", "claude-cloud", id="responses-anthropic"),
    pytest.param("completions", "text-cloud", id="completions"),
]
everywhere = pytest.mark.parametrize(("dialect", "model"), TARGETS)
# Headers that differ from request to request, or that the transport writes.
VOLATILE: Final = {"content-length", "host", "x-request-id", "traceparent"}
LITELLM_NAMES: Final = """
import json
from litellm.types.utils import all_litellm_params
print(json.dumps(sorted(all_litellm_params)))
"""


@pytest.fixture(scope="module")
def sink() -> Iterator[ByteSink]:
    with ByteSink() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_reaches_the_sink(sink: ByteSink) -> Iterator[None]:
    yield
    assert sink.seen == []


@pytest.fixture(scope="module")
def litellm_names() -> list[str]:
    """All names that LiteLLM takes for itself, as it lists them."""
    local = {name: "True" for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_BLOG_POSTS")}
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LITELLM_NAMES],
        env={**os.environ, **local},
        capture_output=True,
        text=True,
        check=True,
    )
    names: list[str] = json.loads(told.stdout.splitlines()[-1])
    assert {"api_base", "api_key", "mock_response", "fallbacks"} <= set(names)
    return names


FIELDS: Final[dict[str, Any]] = {
    "api_key": THEIRS,
    "api_version": "2020-01-01",
    "organization": "org-theirs",
    "mock_response": "I am a mock.",
    "mock_tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}],
    "mock_timeout": True,
    "mock_testing_fallbacks": True,
    "mock_testing_rate_limit_error": True,
    "context_window_fallbacks": [{"cloud": ["spare"]}],
    "context_window_fallback_dict": {"gpt-mock": "spare"},
    "content_policy_fallbacks": [{"cloud": ["spare"]}],
    "default_fallbacks": ["spare"],
    "disable_fallbacks": True,
    "model_info": {"id": "theirs"},
    "specific_deployment": True,
    "custom_llm_provider": "anthropic",
    "litellm_credential_name": "theirs",
    "litellm_logging_obj": {"x": 1},
    "litellm_call_id": "theirs",
    "litellm_session_id": "theirs",
    "litellm_trace_id": "theirs",
    "secret_fields": {"raw_headers": {"authorization": THEIRS}},
    "callbacks": ["langfuse"],
    "success_callback": ["langfuse"],
    "failure_callback": ["langfuse"],
    "langfuse_public_key": THEIRS,
    "langfuse_secret_key": THEIRS,
    "tags": ["free"],
    "guardrails": ["none"],
    "timeout": 0.001,
    "request_timeout": 0.001,
    "stream_timeout": 0.001,
    "force_timeout": 0.001,
    "num_retries": 3,
    "max_retries": 3,
    "retry_policy": {"BadRequestErrorRetries": 3},
    "cooldown_time": 1,
    "max_parallel_requests": 1,
    "rpm": 1,
    "tpm": 1,
    "max_budget": 0.0,
    "budget_duration": "1s",
    "input_cost_per_token": 0.0,
    "output_cost_per_token": 0.0,
    "base_model": "gpt-4",
    "drop_params": True,
    "additional_drop_params": ["messages"],
    "allowed_openai_params": ["api_base"],
    "extra_headers": {"authorization": f"Bearer {THEIRS}", "x-theirs": "1"},
    "headers": {"authorization": f"Bearer {THEIRS}", "x-theirs": "1"},
    "extra_query": {"theirs": "1"},
    "provider_specific_header": {"custom_llm_provider": "openai", "extra_headers": {"x": "1"}},
    "cache": {"no-store": True},
    "caching": True,
    "cache_key": "theirs",
    "prompt_id": "theirs",
    "prompt_variables": {"a": "b"},
    "hf_model_name": "theirs",
    "no-log": True,
    "turn_off_message_logging": True,
    "litellm_disabled_callbacks": ["generic_api"],
    "ssl_verify": False,
    "client": "theirs",
    "client_id": "theirs",
    "tenant_id": "theirs",
    "region_name": "theirs",
    "silent_model": "spare",
    "use_litellm_proxy": True,
    "use_in_pass_through": True,
    "use_chat_completions_api": True,
    "configurable_clientside_auth_params": ["api_base"],
    "allow_client_keepalive_override": True,
}


def attacks(sink: ByteSink) -> dict[str, Any]:
    """Return fields that would move a request, spend money, or call somebody."""
    theirs = {"model": "openai/gpt-x", "api_base": f"{sink.url}/v1", "api_key": THEIRS}
    group = {"model_name": "cloud", "litellm_params": theirs}
    return {
        **dict.fromkeys(("api_base", "base_url", "endpoint", "azure_endpoint"), f"{sink.url}/v1"),
        **dict.fromkeys(("langfuse_host", "langsmith_base_url", "posthog_api_url"), sink.url),
        **dict.fromkeys(("arize_endpoint", "otel_endpoint", "s3_endpoint_url"), sink.url),
        **dict.fromkeys(("webhook_url", "callback_url", "aws_sts_endpoint"), sink.url),
        "fallbacks": [theirs],
        "model_list": [group],
        "user_config": {"model_list": [group]},
        "litellm_params": theirs,
        "litellm_metadata": {"tags": ["free"], **theirs},
        "proxy_server_request": {"url": sink.url, "headers": {}, "body": theirs},
        **FIELDS,
    }


HEADERS: Final = {
    "x-litellm-api-key": THEIRS,
    "x-litellm-tags": "free",
    "x-litellm-timeout": "0.001",
    "x-litellm-stream-timeout": "0.001",
    "x-litellm-num-retries": "3",
    "x-litellm-keepalive-seconds": "1",
    "x-litellm-disable-callbacks": "generic_api",
    "x-litellm-spend-logs-metadata": '{"theirs": 1}',
    "x-litellm-session-id": "theirs",
    "x-litellm-trace-id": "theirs",
    "x-litellm-agent-id": "theirs",
    "x-litellm-model-id": "theirs",
    "x-litellm-end-user-id": "theirs",
    "x-litellm-enable-message-redaction": "true",
    "x-pass-authorization": f"Bearer {THEIRS}",
    "x-pass-x-theirs": "1",
    "langfuse_public_key": THEIRS,
    "langfuse_trace_id": "theirs",
    "langfuse_host": "http://127.0.0.1:9",
    "x-goog-api-key": THEIRS,
    "api-key": THEIRS,
    "ocp-apim-subscription-key": THEIRS,
    "azure-api-key": THEIRS,
    "helicone-auth": THEIRS,
    "openai-organization": "org-theirs",
    "openai-project": "theirs",
    "x-mcp-auth": THEIRS,
    "x-forwarded-for": "203.0.113.9",
    "cookie": f"token={THEIRS}",
}


class Target:
    """One dialect before one model; `plain` is what its cloud sees of a request without tricks."""

    def __init__(self, gateway: GatewayServer, dialect: str, model: str) -> None:
        self.gateway = gateway
        self.dialect = dialect
        self.model = model
        self.plain = seen(self.send())

    def send(
        self, more: Any = None, headers: Any = None, query: str = ""
    ) -> tuple[DialectAnswer, list[CloudRequest]]:
        self.gateway.cloud.forget()
        body = body_of(self.dialect, self.model, "Hello there.") | (more or {})
        answer = ask(self.gateway.url, self.dialect, body, headers=headers, query=query)
        return answer, self.gateway.cloud.generations()

    def held(self, more: Any = None, headers: Any = None, query: str = "") -> bool:
        """Say whether the cloud saw what it sees without `more`; else the answer is a 400."""
        answer, requests = sent = self.send(more, headers, query)
        if answer.status == 400:
            assert requests == []
            return False
        assert answer.text == HELLO.text, answer.raw
        assert seen(sent) == self.plain
        return True

    def swept(self, fields: dict[str, Any]) -> set[str]:
        """Send all `fields` at once, and fewer where that is refused; return those refused."""
        if self.held(fields):
            return set()
        if len(fields) == 1:
            return set(fields)
        names = list(fields)
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        found = [self.swept({name: fields[name] for name in half}) for half in halves]
        return found[0] | found[1]


def seen(sent: tuple[DialectAnswer, list[CloudRequest]]) -> tuple[str, Any, dict[str, str]]:
    """Return path, body and lasting headers of the one request that a cloud has seen."""
    answer, requests = sent
    assert answer.status == 200, answer.raw
    (request,) = requests
    headers = {name: each for name, each in request.headers.items() if name not in VOLATILE}
    assert not request.query
    return request.path, request.json, headers


@pytest.fixture
def target(gateway: GatewayServer, dialect: str, model: str) -> Target:
    return Target(gateway, dialect, model)


@everywhere
def test_no_field_at_the_top_moves_a_request(target: Target, sink: ByteSink) -> None:
    fields = attacks(sink)
    refused = target.swept(fields)
    assert len(refused) < len(fields) / 4, "most are left out, as unknown fields always were"


@everywhere
def test_none_of_litellms_own_names_moves_a_request(
    target: Target, sink: ByteSink, litellm_names: list[str]
) -> None:
    taken = {"model", "messages", "metadata", *attacks(sink)}
    values: tuple[Any, ...] = (f"{sink.url}/v1", {"a": sink.url}, True)
    for value in values:
        target.swept({name: value for name in litellm_names if name not in taken})


@everywhere
@pytest.mark.parametrize("place", ["metadata", "extra_body", "extra_headers", "litellm_metadata"])
def test_no_field_in_a_dictionary_moves_a_request(
    target: Target, sink: ByteSink, place: str
) -> None:
    """What of `metadata` is the user's own may pass; it is compared apart."""
    answer, requests = target.send({place: attacks(sink)})
    if answer.status == 400:
        assert requests == []
        return
    assert answer.text == HELLO.text, answer.raw
    (request,) = requests
    path, body, headers = seen((answer, requests))
    allowed = {"metadata"} if place == "metadata" else set()
    plain_path, plain_body, plain_headers = target.plain
    assert (path, headers) == (plain_path, plain_headers)
    kept = {name: each for name, each in body.items() if name not in allowed}
    assert kept == {name: each for name, each in plain_body.items() if name not in allowed}
    assert THEIRS not in request.headers.values()


@everywhere
def test_no_field_within_a_message_or_a_tool_moves_a_request(
    target: Target, sink: ByteSink
) -> None:
    if target.dialect == "completions":
        assert target.held({"messages": [attacks(sink)], "tools": [attacks(sink)]}) in (True, False)
        return
    words = "input_text" if target.dialect == "responses" else "text"
    part = {"type": words, "text": "Hello there.", **attacks(sink)}
    field = "input" if target.dialect == "responses" else "messages"
    for row in (
        {"role": "user", "content": "Hello there.", **attacks(sink)},
        {"role": "user", "content": [part]},
    ):
        answer, requests = target.send({field: [row]})
        assert answer.status in (200, 400), answer.raw
        held_clean(sink, requests)
        assert len(requests) == (answer.status == 200)
    schema = {"type": "object", "properties": {}}
    tool: dict[str, Any] = {"type": "function", "name": "f", "parameters": schema}
    if target.dialect == "chat":
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    if target.dialect == "messages":
        tool = {"name": "f", "input_schema": schema}
    answer, requests = target.send({"tools": [{**tool, **attacks(sink)}]})
    assert answer.status in (200, 400), answer.raw
    held_clean(sink, requests)


def held_clean(sink: ByteSink, requests: list[CloudRequest]) -> None:
    """Nothing that the attacker named has come to the cloud."""
    for request in requests:
        for text in (request.body.decode(), json.dumps(request.headers)):
            assert THEIRS not in text
            assert str(sink.port) not in text


@everywhere
def test_no_header_moves_a_request(target: Target) -> None:
    assert target.held(headers=HEADERS)
    for name, value in HEADERS.items():
        assert target.held(headers={name: value}), name


@everywhere
def test_nothing_in_the_query_moves_a_request(target: Target, sink: ByteSink) -> None:
    for query in (
        f"?api_base={sink.url}/v1&api_key={THEIRS}&model=spare",
        "?mock_response=x&timeout=0.001&fallbacks=spare&user_config=x",
    ):
        assert target.held(query=query) in (True, False)


def test_a_models_name_cannot_name_a_provider(
    gateway: GatewayServer, cloud: MockCloud, sink: ByteSink
) -> None:
    """Only names of the config reach it: else a client could pick any provider's host."""
    for name in (
        *("openai/gpt-4o", "anthropic/claude-3", "groq/x", "custom_openai/x", "ollama/x"),
        *("vertex_ai/x", "azure/x", f"openai/{sink.url}", "hearth/local", "cloud,spare"),
        *("*", "gpt-mock", "openai/*", "openai/gpt-mock", "anthropic/flaky"),
    ):
        for dialect in PATHS:
            answer = ask(gateway.url, dialect, body_of(dialect, name, "n=1"))
            assert answer.status in (200, 400, 404), answer.raw
            if answer.status == 200:
                assert answer.served_by == "hearth/local", (name, dialect)
    assert cloud.generations() == []


def test_a_fallback_does_not_carry_them_either(
    gateway: GatewayServer, cloud: MockCloud, sink: ByteSink
) -> None:
    for dialect in ("chat", "messages", "responses"):
        cloud.forget()
        body = body_of(dialect, "local-first", "n=2 full=0")
        assert ask(gateway.url, dialect, body).text == HELLO.text
        (plain,) = cloud.generations()
        cloud.forget()
        answer = ask(gateway.url, dialect, {**attacks(sink), **body}, headers=HEADERS)
        if answer.status == 400:
            assert cloud.generations() == []
            continue
        (request,) = cloud.generations()
        assert request.json == plain.json
