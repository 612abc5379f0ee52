"""Checks the origins, keys, models and routes that are refused before a worker is asked."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from hearth.proxy.http import http_exchange as exchange_module
from hearth.proxy.workers.keep_awake import KeepAwake
from tests.helpers.proxy.app_over_workers import DEBUG, KEY
from tests.helpers.proxy.proxy_app import app_of, ask


def test_the_models_are_listed_in_the_shape_of_the_api_that_is_asked(tmp_path: Any) -> None:
    edge = app_of(tmp_path, PROXY_MODEL_ID="org/model", MODEL_ALIASES="mine")
    openai = ask(edge).json
    assert set(openai) == {"object", "data"}
    assert [row["id"] for row in openai["data"]] == ["org/model", "mine"]
    assert set(openai["data"][0]) == {"id", "object", "created", "owned_by", "description"}
    version = (b"anthropic-version", b"2023-06-01")
    anthropic = ask(edge, "GET", "/v1/models", version).json
    assert set(anthropic) == {"data", "has_more", "first_id", "last_id"}
    assert (anthropic["first_id"], anthropic["last_id"]) == ("org/model", "mine")
    one = ask(edge, "GET", "/v1/models/org/model", version).json
    assert one == anthropic["data"][0]
    assert (one["type"], one["display_name"]) == ("model", "org/model")
    assert ask(edge, "GET", "/v1/models/gpt-5").json["id"] == "gpt-5"
    assert ask(edge, "GET", "/v1/models/none", version).json["type"] == "error"
    for name in ("ORG/Model", "org/model:latest"):
        assert ask(edge, "GET", f"/v1/models/{name}").json == openai["data"][0]
    assert "Served: org/model, mine" in ask(edge, "GET", "/v1/models/none").json["error"]["message"]


def test_health_needs_no_key_and_everything_else_does(tmp_path: Any) -> None:
    edge = app_of(tmp_path, PROXY_API_KEY="k")
    assert ask(edge, path="/health").status == 200
    assert ask(edge, path="/health").json["status"] in ("starting", "degraded")
    for path in ("/v1/models", "/", "/health/liveliness", "/nothing"):
        reply = ask(edge, path=path)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert ask(edge, "GET", "/v1/models", (b"x-api-key", b"k")).status == 200


def test_a_balancer_reads_in_a_status_that_no_request_is_taken_yet(tmp_path: Any) -> None:
    reply = ask(app_of(tmp_path, PROXY_API_KEY="k"), "GET", "/health/ready")
    assert (reply.status, reply.json["ready"], reply.json["free"]) == (503, False, 0)
    assert set(reply.json) == {"ready", "free", "status"}


@pytest.mark.parametrize(
    "path",
    [
        "/ui",
        "/openapi.json",
        "/routes",
        "/key/generate",
        "/v1/embeddings",
        "/anthropic/v1/messages",
        "/v1/models/../../ui",
        "/health/readiness",
        "/openai/v1/models",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_no_other_route_is_reachable(tmp_path: Any, path: str, method: str) -> None:
    assert ask(app_of(tmp_path), method, path, body=b"{}").status in (404, 405)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/cache", "GET, HEAD, DELETE"),
        ("/v1/cache/prompts/abc", "GET, HEAD"),
        ("/v1/cache/prefill", "POST"),
        ("/v1/cache/pins/x", "DELETE"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/sessions", "GET, HEAD"),
        ("/v1/sessions/s", "GET, HEAD"),
    ],
)
def test_a_route_takes_its_methods_from_whoever_has_the_key(
    tmp_path: Any, path: str, allowed: str
) -> None:
    edge = app_of(tmp_path, **DEBUG)
    assert ask(edge, allowed.split(", ")[0], path).status == 401
    for method in {"GET", "POST", "PUT", "PATCH", "DELETE"} - set(allowed.split(", ")):
        reply = ask(edge, method, path, KEY)
        assert (reply.status, reply.headers["allow"]) == (405, allowed)


def test_a_request_before_a_worker_is_ready_is_told_to_come_back(tmp_path: Any) -> None:
    body = b'{"model": "smollm2", "messages": [{"role": "user", "content": "x"}]}'
    reply = ask(app_of(tmp_path), "POST", "/v1/chat/completions", body=body)
    assert (reply.status, reply.headers["retry-after"]) == (503, "5")
    assert reply.json["error"]["code"] == "overloaded"


def test_a_body_over_the_limit_is_measured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "BODY_BYTES_MAX", 1_000)
    reply = ask(app_of(tmp_path), "POST", "/v1/messages", body=b" " * 1_500)
    assert reply.status == 413
    assert "1,500 bytes and this server accepts 1,000" in reply.json["error"]["message"]


def test_a_preflight_is_answered_for_listed_origins_only(tmp_path: Any) -> None:
    edge = app_of(tmp_path, CORS_ORIGINS="http://app.example")
    asked = (b"access-control-request-headers", b"x-api-key")
    reply = ask(edge, "OPTIONS", "/v1/models", (b"origin", b"http://app.example"), asked)
    assert reply.status == 204
    assert reply.headers["access-control-allow-origin"] == "http://app.example"
    assert reply.headers["access-control-allow-headers"] == "x-api-key"
    assert reply.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    refused = ask(edge, "OPTIONS", "/v1/models", (b"origin", b"http://evil.example"))
    assert refused.status == 403
    assert not any(name.startswith("access-control") for name in refused.headers)
    listed = ask(edge, "GET", "/v1/models", (b"origin", b"http://app.example"))
    assert listed.headers["access-control-allow-origin"] == "http://app.example"


@pytest.mark.parametrize(
    ("method", "path", "count"),
    [
        ("POST", "/v1/chat/completions", 1),
        ("POST", "/v1/messages", 1),
        ("POST", "/v1/cache/prefill", 1),
        ("POST", "/v1/messages/count_tokens", 0),
        ("GET", "/v1/chat/completions", 0),
        ("GET", "/v1/models", 0),
        ("GET", "/health", 0),
    ],
)
def test_what_computes_for_a_client_keeps_the_machine_awake(
    tmp_path: Any, method: str, path: str, count: int
) -> None:
    edge, opened = app_of(tmp_path), []

    class Noting(KeepAwake):
        @contextlib.contextmanager
        def request(self) -> Iterator[None]:
            opened.append("request")
            yield

    edge.keep_awake = Noting()
    ask(edge, method, path, body=b'{"model": "claude-x"}')
    assert len(opened) == count
