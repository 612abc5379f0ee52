"""The routes of kept responses, and a request that goes on from one that is not kept."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from hearth.proxy.app import ProxyApp
from hearth.proxy.request.session_id import key_digest
from tests.helpers.proxy.proxy_app import Reply, app_of, ask

ME, OTHER = "Bearer mine", "Bearer other"
RESPONSE = {"id": "resp_1", "object": "response", "output": []}


@pytest.fixture
def edge(tmp_path: Path) -> ProxyApp:
    made = app_of(tmp_path, PROXY_API_KEYS="mine, other")
    key = key_digest({"x-api-key": "mine"})
    made.routes.stored.keep(key, {"input": [{"role": "user", "content": "hi"}]}, RESPONSE)
    return made


def asked(edge: ProxyApp, method: str, path: str, key: str = ME, body: Any = None) -> Reply:
    raw = b"" if body is None else orjson.dumps(body)
    return ask(edge, method, path, (b"authorization", key.encode()), body=raw)


@pytest.mark.parametrize("prefix", ["/v1/responses/", "/responses/"])
def test_a_kept_response_is_read_and_deleted(edge: ProxyApp, prefix: str) -> None:
    path = f"{prefix}resp_1"
    assert asked(edge, "GET", path).json == RESPONSE
    items = asked(edge, "GET", f"{path}/input_items").json
    assert [row["content"] for row in items["data"]] == ["hi"]
    assert asked(edge, "DELETE", path, OTHER).status == 404
    assert asked(edge, "DELETE", path).json["deleted"] is True
    assert asked(edge, "GET", path).status == 404


def test_only_who_asked_for_it_is_told(edge: ProxyApp) -> None:
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/input_items"):
        reply = asked(edge, "GET", path, OTHER)
        assert reply.status == 404
        assert reply.json["error"]["code"] == "not_found"
    assert asked(edge, "PUT", "/v1/responses/resp_1").status == 405


def test_a_request_that_goes_on_from_nothing_is_told_what_to_do(edge: ProxyApp) -> None:
    body = {"model": "gpt-5", "input": "x", "previous_response_id": "resp_2"}
    reply = asked(edge, "POST", "/v1/responses", body=body)
    assert reply.status == 404
    error = reply.json["error"]
    assert (error["code"], error["param"]) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    assert "Send the whole conversation in input" in error["message"]


def test_what_is_not_served_is_not_there_rather_than_another_method(edge: ProxyApp) -> None:
    for path in ("/v1/responses/compact", "/v1/responses/resp_1/cancel"):
        assert asked(edge, "POST", path, body={}).status == 404


def test_a_kept_response_is_not_streamed_and_says_so(edge: ProxyApp) -> None:
    reply = ask(
        edge,
        "GET",
        "/v1/responses/resp_1",
        (b"authorization", ME.encode()),
        query=b"stream=true",
    )
    assert reply.status == 400 and reply.json["error"]["param"] == "stream"
