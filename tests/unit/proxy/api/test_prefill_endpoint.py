"""The proxy's half of use_kv_cache, of /v1/cache/prefill and of its pins, over scripted workers."""

import logging
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import orjson
import pytest
from hypothesis import given, strategies as st

from hearth.commands.replay.traces import load_trace
from hearth.proxy.api import prefill_endpoint
from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.app import ProxyApp
from hearth.proxy.pool.worker_pool import CacheAffinity
from hearth.proxy.request.parsed_request import Dialect
from hearth.shared.errors import RequestError
from hearth.shared.paths import PROJECT_DIR
from tests.helpers.proxy.app_over_workers import front
from tests.helpers.proxy.proxy_app import Reply, app_of, ask, asked
from tests.helpers.proxy.request_bodies import BODIES, SAID, post

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TRACES = sorted((PROJECT_DIR / "tests/data/traces").glob("*.xz"))
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda rows: st.lists(rows, max_size=3) | st.dictionaries(st.text(max_size=5), rows),
    max_leaves=5,
)
TELLING = ("messages", "prompt", "input", "system", "tools", "previous_response_id", "max_tokens")


# ---------------------------------------------------------------- whose body it is


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_what_clients_sent_is_told_apart_with_their_headers_and_without(path: Path) -> None:
    rows = load_trace(path)
    assert rows
    for row in rows:
        headers = {name.lower(): value for name, value in row.headers.items()}
        for given_headers in (headers, {}):
            assert prefill_endpoint.dialect_of(row.body, given_headers, {}) == row.dialect


@pytest.mark.parametrize(
    ("body", "headers", "dialect"),
    [
        *((body, {}, dialect) for dialect, body in BODIES.items()),
        ({"messages": SAID}, {"anthropic-version": "2023-06-01"}, "messages"),
        ({"messages": SAID, "tools": [{"name": "f", "input_schema": {}}]}, {}, "messages"),
        ({"messages": SAID, "tools": [{"type": "function", "function": FUNCTION}]}, {}, "chat"),
        ({"messages": SAID, "tools": None, "prompt": "x"}, {}, "chat"),
        ({"previous_response_id": "resp_1"}, {}, "responses"),
        ({"prompt": [1, 2, 3]}, {}, "completions"),
    ],
)
def test_a_body_is_known_by_what_only_its_api_has(
    body: dict[str, Any], headers: dict[str, str], dialect: str
) -> None:
    assert prefill_endpoint.dialect_of(body, headers, {}) == dialect


@given(body=st.dictionaries(st.sampled_from(TELLING), ANY_JSON), wanted=st.text(max_size=9))
def test_any_body_is_somebodys_and_the_query_decides(body: dict[str, Any], wanted: str) -> None:
    assert prefill_endpoint.dialect_of(body, {}, {}) in get_args(Dialect)
    for dialect in get_args(Dialect):
        assert prefill_endpoint.dialect_of(body, {}, {"dialect": dialect}) == dialect
    if wanted not in get_args(Dialect):
        with pytest.raises(RequestError, match=r"dialect is .*allowed is chat, completions"):
            prefill_endpoint.dialect_of(body, {}, {"dialect": wanted})


# ---------------------------------------------------------------- a prefill


@pytest.mark.process
@pytest.mark.parametrize("dialect", BODIES)
async def test_a_prompt_is_read_and_not_answered_and_the_log_has_its_line(
    dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hearth.proxy.local_answers")
    async with front(1) as made:
        reply = await post(made, BODIES[dialect] | {"stream": True, "pin": True})
        assert reply.status == 200, reply.content
        (row,) = made.made.events("Submit")
        assert (row["prefill_only"], row["pin"], row["use_kv_cache"]) == (True, True, True)
        tokens = reply.json["prompt_tokens"]
        assert reply.json == {
            "object": "cache.prefill",
            "id": row["request_id"],
            "model": "smollm2",
            "prompt_tokens": tokens,
            "cached_tokens": tokens // 2,
            "prefilled_tokens": tokens - tokens // 2,
            "source": "ram",
            "ms": 5,
            "pinned": True,
        }
        assert reply.headers["x-request-id"] == row["request_id"]
        line = f"request id={row['request_id']} dialect={dialect} "
        assert line in caplog.text and "ended=prefilled" in caplog.text
        assert (await post(made, BODIES[dialect])).json["pinned"] is False
        assert not made.made.pool.links[0].load


@pytest.mark.parametrize("dialect", BODIES)
def test_what_cannot_be_prefilled_is_refused_in_the_callers_shape(
    dialect: str, tmp_path: Path
) -> None:
    edge = app_of(tmp_path)
    for field, value, status in (
        ("use_kv_cache", False, 400),
        ("use_kv_cache", "no", 400),
        ("pin", 1, 400),
        ("model", 5, 400),
    ):
        body = orjson.dumps(BODIES[dialect] | {field: value})
        reply = ask(edge, "POST", prefill_endpoint.PATH, body=body)
        assert reply.status == status, (field, reply.content)
        error = reply.json["error"]
        assert field in error["message"]
        assert (reply.json.get("type") == "error") == (dialect == "messages")
        assert (error.get("param") == field) == (dialect != "messages")


def test_several_prompts_and_a_wrong_dialect_are_refused(tmp_path: Path) -> None:
    edge = app_of(tmp_path)
    body = orjson.dumps({"model": "smollm2", "prompt": ["a", "b"]})
    reply = ask(edge, "POST", prefill_endpoint.PATH, body=body)
    assert reply.status == 400 and "one prompt" in reply.json["error"]["message"]
    reply = ask(edge, "POST", prefill_endpoint.PATH, body=body, query=b"dialect=gemini")
    assert reply.status == 400 and reply.json["error"]["param"] == "dialect"


@pytest.mark.process
@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_a_pin_that_the_worker_refuses_is_told_with_its_status(dialect: str) -> None:
    async with front(1) as made:
        said = [{"role": "user", "content": "refuse=409:pins_full"}]
        reply = await post(made, BODIES[dialect] | {"messages": said, "pin": True})
        assert reply.status == 409
        assert "Refused as asked" in reply.json["error"]["message"]
        assert (reply.json.get("type") == "error") == (dialect == "messages")


# ---------------------------------------------------------------- pins


async def unpin(edge: ProxyApp, pin_id: str, key: bytes) -> Reply:
    return await asked(edge, "DELETE", f"/v1/cache/pins/{pin_id}", (b"x-api-key", key))


@pytest.mark.process
async def test_a_pin_is_given_up_once_and_by_its_own_key_only() -> None:
    async with front(2, PROXY_API_KEY="", PROXY_API_KEYS="k, other") as made:
        pin_id = (await post(made, BODIES["chat"] | {"pin": True})).json["id"]
        for name, key in ((pin_id, b"other"), ("nobody's", b"k")):
            reply = await unpin(made.app, name, key)
            assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")
            assert "/v1/cache lists" in reply.json["error"]["message"]
        reply = await unpin(made.app, pin_id, b"k")
        assert reply.json == {"id": pin_id, "object": "cache.pin", "deleted": True}
        assert (await unpin(made.app, pin_id, b"k")).status == 404


@pytest.mark.process
async def test_with_one_key_whoever_has_it_gives_up_any_pin() -> None:
    async with front(1) as made:
        pin_id = (await post(made, BODIES["chat"] | {"pin": True})).json["id"]
        assert (await unpin(made.app, pin_id, b"wrong")).status == 401
        assert (await unpin(made.app, pin_id, b"k")).status == 200


# ---------------------------------------------------------------- apart


@pytest.mark.parametrize("dialect", BODIES)
def test_every_dialect_says_whether_its_request_is_kept_and_otherwise_it_is(
    dialect: str, tmp_path: Path
) -> None:
    body_parser = app_of(tmp_path).local.body_parser
    for wanted in (True, False):
        body = BODIES[dialect] | {"use_kv_cache": wanted}
        assert body_parser.parse(dialect, body, {}).use_kv_cache is wanted  # type: ignore[arg-type]
    for silent in (BODIES[dialect], BODIES[dialect] | {"use_kv_cache": None}):
        assert body_parser.parse(dialect, silent, {}).use_kv_cache  # type: ignore[arg-type]


def test_a_prediction_is_nothing_to_a_prompt_that_is_only_read() -> None:
    body = BODIES["chat"] | {"prediction": {"type": "content", "content": "words"}}
    request = DIALECTS["chat"].parse(body)
    assert request.prediction == "words"
    assert prefill_endpoint.prefill_request(request).prediction == ""


@pytest.mark.process
@pytest.mark.parametrize(
    ("more", "is_stored"),
    [
        ({}, True),
        ({"store": True}, True),
        ({"store": False}, False),
        ({"use_kv_cache": False}, False),
        ({"use_kv_cache": False, "store": None}, False),
        ({"use_kv_cache": False, "store": True}, True),
        ({"use_kv_cache": True, "store": False}, False),
    ],
)
async def test_an_answer_apart_is_stored_only_where_that_is_asked_for(
    more: dict[str, Any], is_stored: bool
) -> None:
    async with front(1) as made:
        reply = await post(made, BODIES["responses"] | more, "/v1/responses")
        assert reply.json["store"] is is_stored
        path = f"/v1/responses/{reply.json['id']}"
        assert (await made.ask("GET", path)).status == (200 if is_stored else 404)


@pytest.mark.process
async def test_where_a_request_apart_went_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remembered = mock.Mock()
    monkeypatch.setattr(CacheAffinity, "remember", remembered)

    async with front(1) as made:
        for more in ({"use_kv_cache": False}, {}):
            assert (await post(made, BODIES["responses"] | more, "/v1/responses")).status == 200
        assert (await post(made, BODIES["chat"])).status == 200
    apart, answered, read = (call.args[0] for call in remembered.call_args_list)
    assert apart == [] and answered and read
