"""A user's logging tool is told of local and cloud answers what the clients saw."""

import time
from typing import Any, Final

import pytest

from tests.helpers.cloud.cloud_answers import RATE_LIMIT, CloudAnswer
from tests.helpers.cloud.dialect_requests import DIALECTS, DialectAnswer, ask, body_of
from tests.helpers.cloud.gateway_server import GatewayServer
from tests.helpers.servers.server import READY_S_MAX

ONE_MORE_S: Final = 0.3  # in which a row that is one too many would come
Usage = tuple[int, int, int]  # prompt, cached, completion


def usage_of(row: dict[str, Any]) -> Usage:
    """Return a row's tokens: its own fields, and the cached ones as LiteLLM passes them on."""
    told = (row.get("metadata") or {}).get("usage_object") or {}
    details = told.get("prompt_tokens_details") or told.get("input_tokens_details") or {}
    cached = details.get("cached_tokens") or told.get("cache_read_input_tokens") or 0
    return row["prompt_tokens"], cached, row["completion_tokens"]


def logged(gateway: GatewayServer, before: int, count: int) -> list[dict[str, Any]]:
    """Return the rows of successes that came since there were `before`, once they are `count`.

    The first of all waits for LiteLLM to be loaded.
    """
    deadline = time.monotonic() + READY_S_MAX
    while True:
        rows = [row for row in gateway.callbacks.rows[before:] if row["status"] == "success"]
        if len(rows) >= count:
            time.sleep(ONE_MORE_S)
            return [r for r in gateway.callbacks.rows[before:] if r["status"] == "success"]
        assert time.monotonic() < deadline, (rows, gateway.log.read_text()[-2000:])
        time.sleep(0.02)


def logged_before(gateway: GatewayServer) -> list[Any]:
    """Return the rows of earlier tests, once no more of them comes."""
    count = -1
    while count < (count := len(gateway.callbacks.rows)):
        time.sleep(ONE_MORE_S)
    return gateway.callbacks.rows


def test_every_answer_is_told_once_with_its_tokens(gateway: GatewayServer) -> None:
    """Each dialect, whole and as a stream, by the local model and by the cloud."""
    before = len(logged_before(gateway))
    seen: dict[str, list[Usage]] = {"local": [], "cloud": []}
    for number, dialect in enumerate(DIALECTS):
        for stream in (False, True):
            for model, usages in seen.items():
                answer = asked(gateway, dialect, model, stream, number)
                usages.append(answer.usage)
                rows = logged(gateway, before, sum(map(len, seen.values())))
    assert len(rows) == 4 * len(DIALECTS)
    for model, usages in seen.items():
        told = [usage_of(row) for row in rows if row.get("model_group") == model]
        assert sorted(told) == sorted(usages), model
    assert any(cached for _, cached, _ in seen["local"])
    assert any(cached for _, cached, _ in seen["cloud"])


def asked(
    gateway: GatewayServer, dialect: str, model: str, stream: bool, number: int
) -> DialectAnswer:
    with_usage = stream and dialect in ("chat", "completions")
    more = {"stream_options": {"include_usage": True}} if with_usage else {}
    body = body_of(dialect, model, f"n={2 + number} {dialect}", stream=stream, **more)
    answer = ask(gateway.url, dialect, body)
    assert answer.status == 200 and not answer.error, answer.raw
    return answer


def test_an_answer_after_a_fallback_is_told_once_as_answered(gateway: GatewayServer) -> None:
    before = len(logged_before(gateway))
    gateway.cloud.answers["flaky"] = CloudAnswer(error=RATE_LIMIT)
    usages = []
    for model, script in (("local-first", "n=2 full=0"), ("cloud-first", "n=2")):
        answer = ask(gateway.url, "chat", body_of("chat", model, script))
        assert answer.fallback
        usages.append(answer.usage)
        rows = logged(gateway, before, len(usages))
    assert sorted(map(usage_of, rows)) == sorted(usages)


def test_no_row_has_a_key_and_each_names_its_model(gateway: GatewayServer) -> None:
    before = len(logged_before(gateway))
    for number, model in enumerate(("local", "cloud"), 1):
        ask(gateway.url, "chat", body_of("chat", model, "n=1"))
        rows = logged(gateway, before, number)
    assert {row["model_group"] for row in rows} == {"local", "cloud"}
    assert "sk-mock-cloud-key" not in str(rows)


@pytest.mark.parametrize("stream", [False, True])
def test_a_local_answer_costs_nothing_of_a_budget(gateway: GatewayServer, stream: bool) -> None:
    before = len(logged_before(gateway))
    ask(gateway.url, "messages", body_of("messages", "local", "n=4", stream=stream))
    (row,) = logged(gateway, before, 1)
    assert not row["response_cost"]
