"""Checks what a reply of another server counts as, by how far it came."""

import asyncio
from typing import Any

import pytest

from hearth.proxy.gateway.cloud_requests import CloudReply, CloudRequests
from hearth.proxy.http.body_memory_budget import BodyBudget
from hearth.proxy.http.http_exchange import ClientGone, HttpExchange
from hearth.proxy.monitoring.recent_requests import RecentRequests
from hearth.shared.errors import RequestError
from tests.helpers.proxy.metric_values import made, value

GPT = "openai/gpt-4o"
BROKEN = RequestError("It broke off.", status=503, code="cloud_error")


def exchange() -> HttpExchange:
    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        assert message["type"].startswith("http.response")

    scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": []}
    return HttpExchange(scope, receive, send, BodyBudget())


@pytest.mark.parametrize(
    ("status", "is_begun", "error", "outcome", "ended"),
    [
        (200, True, None, "answered", "answered"),
        (200, True, BROKEN, "failed", "cloud_error"),
        (200, True, ClientGone(), "cancelled", "cancelled"),
        (0, False, ClientGone(), "cancelled", "cancelled"),
        (503, False, BROKEN, "refused_5xx", "cloud_error"),
    ],
)
def test_a_reply_that_broke_off_has_failed_whatever_the_error_is(
    status: int, is_begun: bool, error: RequestError | None, outcome: str, ended: str
) -> None:
    async def body() -> None:
        metrics = made()
        metrics.gateway.know([GPT], is_cloud=True)
        noted = CloudRequests(RecentRequests(), metrics, lambda name: name)
        reply = CloudReply("messages", {}, GPT, "", 0.0, status, error=error)
        asked = exchange()
        if is_begun:
            await asked.start(200, [])
            await asked.body(b"", more=False)
        noted.cloud_ended(asked, reply)
        assert value(metrics, "requests_total", dialect="messages", outcome=outcome) == 1
        assert value(metrics, "served_requests_total", served_by=GPT, outcome=outcome) == 1
        noted.close()
        (row,) = noted.requests.recent("")
        assert row["ended"] == ended

    asyncio.run(body())
