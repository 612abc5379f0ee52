"""Nothing that a config does not name is reached: by a redirect, a count, a retry or a fallback.

The servers that the config names answer each request with a redirect. Where it leads, nothing may
connect. LiteLLM's own client of each provider asks.
"""

from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from tests.helpers.cloud.dialect_requests import ask, body_of, by_night_in_each_way
from tests.helpers.cloud.gateway_server import PROVIDERS, REDIRECTS, GatewayServer, unvisited

COUNTS: Final = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")


@pytest.fixture(autouse=True)
def elsewhere(gateway: GatewayServer) -> Iterator[None]:
    with unvisited() as url:
        gateway.cloud.redirects_to = url
        yield


def post(gateway: GatewayServer, path: str, model: str) -> httpx.Response:
    body: dict[str, Any] = {"model": model, "input": "swordfish"}
    if "messages" in path:
        body = {"model": model, "messages": [{"role": "user", "content": "swordfish"}]}
    return httpx.post(f"{gateway.url}{path}", json=body, timeout=60)


@by_night_in_each_way
def test_a_redirect_takes_neither_prompt_nor_key_elsewhere(
    gateway: GatewayServer, dialect: str, stream: bool
) -> None:
    statuses = set()
    for provider, status in REDIRECTS:
        body = body_of(dialect, f"{provider} {status}", "swordfish", stream=stream)
        answer = ask(gateway.url, dialect, body)
        assert answer.status >= 400 or answer.error, (provider, answer.raw)
        # That bridge of LiteLLM's makes a new error without a cause.
        is_lost = (provider, dialect, stream) == ("text-completion-openai", "responses", True)
        is_spent = provider == "deepseek" and "over budget" in answer.error  # by another test
        assert is_lost or is_spent or "api_base" in answer.error, answer.raw
        statuses.add(answer.status)
    assert 502 in statuses
    assert len(gateway.cloud.requests) > len(PROVIDERS)


def test_a_redirect_of_a_count_an_embedding_or_a_retry_is_not_followed(
    gateway: GatewayServer,
) -> None:
    for path, model in zip(COUNTS, ("anthropic 307", "openai 307"), strict=True):
        post(gateway, path, model)
    assert post(gateway, "/v1/embeddings", "embed").status_code >= 400
    answer = ask(gateway.url, "messages", body_of("messages", "back", "n=2"))
    assert (answer.status, answer.served_by) == (200, "hearth/local"), answer.raw
    assert len(gateway.cloud.requests) >= 2


@pytest.mark.parametrize("path", COUNTS)
@pytest.mark.parametrize("group", ["count-first", "count-broken", "count-either", "wild-card"])
def test_a_count_for_a_local_model_asks_no_cloud(
    gateway: GatewayServer, group: str, path: str
) -> None:
    for _ in range(4):  # a mixed group is dealt out at random
        answer = post(gateway, path, group)
        assert answer.status_code == (503 if group == "count-broken" else 200), answer.text
    assert gateway.cloud.requests == []
