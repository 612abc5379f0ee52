"""Checks what is told of requests that others answered: rows, sums kept apart, series."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.proxy.gateway import gateway as cloud_requests
from hearth.proxy.gateway.gateway import CloudReply, CloudRequests
from hearth.proxy.http.http_exchange import BodyBudget, ClientGone, HttpExchange
from hearth.proxy.monitoring.metrics import CAUSES, CloudUsage
from hearth.proxy.monitoring.recent_requests import RecentRequests
from hearth.shared.errors import RequestError
from hearth.shared.suspending_clock import awake_s
from tests.helpers.proxy.feed_events import USAGE, ended, request_of
from tests.helpers.proxy.metric_values import made, value, values

GPT = "openai/gpt-4o"
ROW = {
    **{"id": "r", "dialect": "chat", "session": "s", "client": "curl 8.5", "served_by": GPT},
    **{"fallback": "", "ended": "answered", "wall_ms": 1_500, "ttft_ms": 200},
}
COST = CloudUsage("r", "dep-1", 100, 60, 7, 0.25)


def refused(status: int) -> RequestError:
    return RequestError("It broke off.", status=status, code="cloud_error")


BROKEN = refused(503)


class Noted:
    """Notes what is ended and told within one event loop, in that order."""

    def __init__(self, *steps: dict[str, Any] | CloudUsage) -> None:
        """A step is a row that ended, also of a `key`, or a usage that is told."""
        self.metrics = made()
        self.metrics.gateway.add_servers([GPT], is_cloud=True)
        names = {"dep-1": GPT}.get
        self.rows = RecentRequests(self.metrics)
        self.requests = CloudRequests(self.rows, self.metrics, lambda each: names(each, ""))
        asyncio.run(self._take(steps))

    async def _take(self, steps: Sequence[dict[str, Any] | CloudUsage]) -> None:
        for step in steps:
            if isinstance(step, CloudUsage):
                self.requests.receive_usage(step)
            else:
                self.requests.ended(ROW | step, step.get("key", ""))
        await asyncio.sleep(0.05)  # a wait that a test has shortened is over

    def told(self, key: str = "") -> list[tuple[Any, ...]]:
        names = ("id", "prompt", "cached", "completion", "cost")
        return [tuple(row[name] for name in names) for row in self.rows.recent(key)]

    def spent(self) -> list[float]:
        sums = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_dollars")
        return [value(self.metrics, f"cloud_{name}_total", served_by=GPT) for name in sums]


@pytest.mark.parametrize("steps", [({}, COST), (COST, {})])
def test_a_request_is_noted_once_with_its_usage_whatever_comes_first(steps: Any) -> None:
    noted = Noted(*steps)
    assert noted.told() == [("r", 100, 60, 7, 0.25)]
    (row,) = noted.rows.recent("")
    about = (row["served_by"], row["wall_ms"], row["ttft_ms"], row["cloud"])
    assert about == (GPT, 1_500, 200, True)
    assert noted.spent() == [100, 60, 7, 0.25]


def test_one_that_is_told_no_usage_of_is_noted_without_after_a_while_or_at_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Noted({})
    assert waiting.told() == []
    waiting.requests.close()
    assert waiting.told() == [("r", 0, 0, 0, None)]
    monkeypatch.setattr(cloud_requests, "USAGE_WAIT_S_MAX", 0.01)
    noted = Noted({})
    assert noted.told() == [("r", 0, 0, 0, None)]
    noted.requests.receive_usage(COST)  # too late for the row, in time for the sums of /metrics
    assert len(noted.told()) == 1 and noted.spent()[0] == 100


def test_the_attempts_of_a_request_cost_together() -> None:
    noted = Noted(replace(COST, completion_tokens=1), COST, {})  # a stream broke, and was paid for
    assert noted.told() == [("r", 200, 120, 8, 0.5)]
    assert noted.spent()[2] == 8


def test_what_nobody_ends_or_tells_takes_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_requests, "WAITING_MAX", 3)
    usages = [replace(COST, request_id=str(number)) for number in range(10)]
    noted = Noted(*usages, {"id": "0"}, {"id": "9"})
    assert [row[0] for row in noted.told()] == ["9"], "what the other cost is forgotten"
    assert len(Noted(*({"id": str(number)} for number in range(5))).told()) == 2


def test_the_hit_rate_is_that_of_local_answers_and_each_key_sees_its_own() -> None:
    noted = Noted()
    local = [ended(replace(USAGE, cached_tokens=50))]
    noted.rows.record(request_of("s"), local, awake_s())
    before = noted.rows.totals("")
    for key in ("", "mine"):
        asyncio.run(noted._take([{"id": f"r{key}", "ended": "cancelled", "key": key}]))
        noted.requests.receive_usage(replace(COST, request_id=f"r{key}"))
    after = noted.rows.totals("")
    assert before["hit_rate"] == after["hit_rate"] == 0.5
    own = {"requests": 2, "cloud": before["cloud"], "disconnects": 1}
    assert after | own == before | own
    assert (after["requests"], after["disconnects"]) == (2, 1), "a client that left has left"
    assert after["cloud"] == {
        **{"requests": 1, "prompt_tokens": 100, "cached_tokens": 60},
        **{"completion_tokens": 7, "cost": 0.25},
    }
    assert [len(noted.told(key)) for key in ("mine", "theirs")] == [1, 0]
    assert noted.rows.totals("theirs")["cloud"]["requests"] == 0


# ---------------------------------------------------------------- /metrics


@pytest.mark.parametrize(
    ("status", "is_begun", "error", "outcome", "ended"),
    [
        (200, True, None, "answered", "answered"),
        (200, True, BROKEN, "failed", "cloud_error"),
        (200, True, ClientGone(), "cancelled", "cancelled"),
        (0, False, ClientGone(), "cancelled", "cancelled"),
        (503, False, BROKEN, "refused_5xx", "cloud_error"),
        (400, False, refused(400), "refused_4xx", "cloud_error"),
        (429, False, refused(429), "refused_4xx", "cloud_error"),
        (500, False, refused(500), "failed", "cloud_error"),
    ],
)
async def test_a_reply_that_broke_off_has_failed_whatever_the_error_is(
    status: int, is_begun: bool, error: RequestError | None, outcome: str, ended: str
) -> None:
    async def send(message: Any) -> None:
        assert message["type"].startswith("http.response")

    metrics = made()
    metrics.gateway.add_servers([GPT], is_cloud=True)
    noted = CloudRequests(RecentRequests(metrics), metrics, lambda name: name)
    reply = CloudReply("messages", {}, GPT, "", 0.0, status, error=error)
    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": []}
    asked = HttpExchange(scope, asyncio.Event().wait, send, BodyBudget())  # type: ignore
    if is_begun:
        await asked.start(200, [])
        await asked.body(b"", more=False)
    noted.cloud_ended(asked, reply)
    noted.close()
    assert [row["ended"] for row in noted.requests.recent("")] == [ended]
    assert value(metrics, "requests_total", dialect="messages", outcome=outcome) == 1
    assert value(metrics, "served_requests_total", served_by=GPT, outcome=outcome) == 1


@given(st.lists(st.tuples(st.text(), st.text(), st.text()), max_size=6))
def test_no_text_of_a_client_becomes_a_label(told: Sequence[tuple[str, str, str]]) -> None:
    metrics = made()
    metrics.gateway.add_servers([GPT], is_cloud=True)
    before = len(values(metrics))
    for served_by, outcome, cause in told:
        metrics.gateway.served(served_by, outcome)
        metrics.gateway.fell_back(cause)
        metrics.gateway.spent(served_by, COST)
    assert len(values(metrics)) <= before + 4 + len({"other"} | set(CAUSES)) * 2
    labels = {label for _, pairs in values(metrics) for name, label in pairs if name == "served_by"}
    assert labels <= {"hearth/model", GPT, "other"}
