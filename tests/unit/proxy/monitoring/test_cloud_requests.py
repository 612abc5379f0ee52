"""Checks what is told of requests that others answered: rows, sums kept apart, series."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.gateway import cloud_requests
from hearth.proxy.gateway.cloud_requests import CloudRequests
from hearth.proxy.monitoring.gateway_metrics import CAUSES, CloudUsage
from hearth.proxy.monitoring.recent_requests import RecentRequests
from hearth.proxy.monitoring.request_metrics import RequestMetrics, outcome_elsewhere
from hearth.shared.suspending_clock import awake_s
from tests.helpers.proxy.feed_events import USAGE, ended, request_of
from tests.helpers.proxy.metric_values import made, value, values

GPT = "openai/gpt-4o"
ROW = {
    **{"id": "r", "dialect": "chat", "session": "s", "client": "curl 8.5", "served_by": GPT},
    **{"fallback": "", "ended": "answered", "wall_ms": 1_500, "ttft_ms": 200},
}
COST = CloudUsage("r", "dep-1", 100, 60, 7, 0.25)


def clouds() -> tuple[CloudRequests, RequestMetrics]:
    metrics = made()
    metrics.gateway.know([GPT], is_cloud=True)
    names = {"dep-1": GPT}.get
    return CloudRequests(RecentRequests(), metrics, lambda each: names(each, "")), metrics


def run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


@pytest.mark.parametrize("order", ["ended first", "told first"])
def test_a_request_is_noted_once_with_its_usage_whatever_comes_first(order: str) -> None:
    async def body() -> None:
        noted, metrics = clouds()
        steps: list[Callable[[], None]] = [lambda: noted.ended(ROW), lambda: noted.told(COST)]
        for step in steps if order == "ended first" else reversed(steps):
            step()
        (row,) = noted.requests.recent("")
        told = {name: row[name] for name in ("prompt", "cached", "completion", "cost", "cloud")}
        assert told == {"prompt": 100, "cached": 60, "completion": 7, "cost": 0.25, "cloud": True}
        assert (row["served_by"], row["wall_ms"], row["ttft_ms"]) == (GPT, 1_500, 200)
        assert value(metrics, "cloud_prompt_tokens_total", served_by=GPT) == 100
        assert value(metrics, "cloud_cached_tokens_total", served_by=GPT) == 60
        assert value(metrics, "cloud_completion_tokens_total", served_by=GPT) == 7
        assert value(metrics, "cloud_cost_dollars_total", served_by=GPT) == 0.25

    run(body)


def test_one_that_is_told_no_usage_of_is_noted_without_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cloud_requests, "USAGE_WAIT_S_MAX", 0.01)

    async def body() -> None:
        noted, metrics = clouds()
        noted.ended(ROW)
        assert noted.requests.recent("") == []
        await asyncio.sleep(0.05)
        (row,) = noted.requests.recent("")
        assert (row["prompt"], row["cost"]) == (0, None)
        noted.told(COST)  # too late for the row, in time for the sums of /metrics
        assert len(noted.requests.recent("")) == 1
        assert value(metrics, "cloud_prompt_tokens_total", served_by=GPT) == 100

    run(body)


def test_a_stop_notes_what_has_ended() -> None:
    async def body() -> None:
        noted, _ = clouds()
        noted.ended(ROW)
        noted.close()
        assert len(noted.requests.recent("")) == 1

    run(body)


def test_the_attempts_of_a_request_cost_together() -> None:
    async def body() -> None:
        noted, metrics = clouds()
        noted.told(replace(COST, completion_tokens=1))  # its stream broke, and it was paid for
        noted.told(COST)
        noted.ended(ROW)
        (row,) = noted.requests.recent("")
        assert (row["prompt"], row["completion"], row["cost"]) == (200, 8, 0.5)
        assert value(metrics, "cloud_completion_tokens_total", served_by=GPT) == 8

    run(body)


def test_usages_of_requests_that_nobody_ends_take_bounded_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cloud_requests, "WAITING_MAX", 3)

    async def body() -> None:
        noted, _ = clouds()
        for number in range(10):
            noted.told(replace(COST, request_id=str(number)))
        noted.ended(ROW | {"id": "0"})
        assert noted.requests.recent("") == []  # what it cost is forgotten: it is waited for
        noted.ended(ROW | {"id": "9"})
        assert [row["id"] for row in noted.requests.recent("")] == ["9"]
        noted.close()

    run(body)


def test_more_that_wait_for_their_usage_are_noted_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_requests, "WAITING_MAX", 2)

    async def body() -> None:
        noted, _ = clouds()
        for number in range(5):
            noted.ended(ROW | {"id": str(number)})
        assert len(noted.requests.recent("")) == 3
        noted.close()
        assert len(noted.requests.recent("")) == 5

    run(body)


def test_the_log_says_who_answered_after_whom_and_no_word_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        noted, _ = clouds()
        noted.ended(ROW | {"fallback": "hearth/big overloaded"})
        noted.told(COST)

    with caplog.at_level(logging.INFO):
        run(body)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "request id=r dialect=chat stream=0 served_by=openai/gpt-4o "
        "fallback=hearth/big overloaded prompt=100 cached=60 completion=7 ended=answered "
        "wall_ms=1500"
    )


def test_the_hit_rate_is_that_of_local_answers() -> None:
    async def body() -> None:
        noted, _ = clouds()
        noted.requests.note(request_of("s"), [ended(replace(USAGE, cached_tokens=50))], awake_s())
        before = noted.requests.totals("")
        noted.ended(ROW)
        noted.told(COST)
        after = noted.requests.totals("")
        assert before["hit_rate"] == after["hit_rate"] == 0.5
        own = {"requests": 1, "cloud": before["cloud"]}
        assert after | own == before | own
        assert after["requests"] == 2
        assert after["cloud"] == {
            **{"requests": 1, "prompt_tokens": 100, "cached_tokens": 60},
            **{"completion_tokens": 7, "cost": 0.25},
        }

    run(body)


def test_each_key_sees_its_own_cloud_requests_only() -> None:
    async def body() -> None:
        noted, _ = clouds()
        noted.ended(ROW, "mine")
        noted.told(COST)
        assert len(noted.requests.recent("mine")) == 1
        assert noted.requests.recent("theirs") == []
        assert noted.requests.totals("theirs")["cloud"]["requests"] == 0

    run(body)


def test_a_client_that_left_a_cloud_answer_has_left() -> None:
    async def body() -> None:
        noted, _ = clouds()
        noted.ended(ROW | {"ended": "cancelled"})
        noted.told(COST)
        assert noted.requests.totals("")["disconnects"] == 1

    run(body)


# ---------------------------------------------------------------- /metrics


def test_every_series_is_there_from_the_start() -> None:
    _, metrics = clouds()
    for served_by in ("hearth/model", GPT):
        assert value(metrics, "served_requests_total", served_by=served_by, outcome="stop") == 0
    for cause in CAUSES:
        assert value(metrics, "fallbacks_total", cause=cause) == 0
    for why in ("dropped", "failed"):
        assert value(metrics, "callback_logs_lost_total", why=why) == 0


def test_an_answer_from_elsewhere_counts_among_the_requests_of_its_dialect() -> None:
    _, metrics = clouds()
    metrics.answered_elsewhere("messages", outcome_elsewhere(200, is_whole=True), GPT)
    assert value(metrics, "requests_total", dialect="messages", outcome="answered") == 1
    assert value(metrics, "served_requests_total", served_by=GPT, outcome="answered") == 1


@pytest.mark.parametrize(
    ("status", "is_whole", "outcome"),
    [
        (200, True, "answered"),
        (200, False, "failed"),
        (499, False, "cancelled"),
        (400, True, "refused_4xx"),
        (429, True, "refused_4xx"),
        (500, True, "failed"),
        (503, True, "refused_5xx"),
    ],
)
def test_what_came_of_it_is_told_by_status(status: int, is_whole: bool, outcome: str) -> None:
    assert outcome_elsewhere(status, is_whole=is_whole) == outcome


def test_a_local_answer_is_counted_by_who_gave_it() -> None:
    metrics = made()
    metrics.ended(request_of("s"), [ended()])
    name, outcome = "hearth/model", "stop"
    assert value(metrics, "served_requests_total", served_by=name, outcome=outcome) == 1


@given(st.lists(st.tuples(st.text(), st.text(), st.text()), max_size=20))
def test_no_text_of_a_client_becomes_a_label(told: Sequence[tuple[str, str, str]]) -> None:
    _, metrics = clouds()
    before = len(values(metrics))
    for served_by, outcome, cause in told:
        metrics.gateway.served(served_by, outcome)
        metrics.gateway.fell_back(cause)
        metrics.gateway.spent(served_by, COST)
    assert len(values(metrics)) <= before + 4 + len({"other"} | set(CAUSES)) * 2
    labels = {label for _, pairs in values(metrics) for name, label in pairs if name == "served_by"}
    assert labels <= {"hearth/model", GPT, "other"}
