"""Makes request metrics and ended answers, and reads the values of the series."""

from collections.abc import Sequence

from prometheus_client import Metric

from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.monitoring.metrics import RequestMetrics
from hearth.proxy.monitoring.recent_requests import RecentRequests
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.shared.suspending_clock import awake_s
from hearth.shared.wire_messages import Admitted, Failed, Finished, Usage
from tests.helpers.clients.scraped_metrics import Series, families_of, series_of
from tests.helpers.proxy.app_over_workers import Front

ASKED = DIALECTS["chat"].parse({"model": "m", "messages": [{"role": "user", "content": "x"}]})
USAGE = Usage(250, 150, 100, 21, 5, "slot", 500, 1_500, None, 7, 100, "prefix", "agent")


def values(metrics: RequestMetrics) -> dict[Series, float]:
    """Return every series but those that time alone moves."""
    families = metrics.registry.collect()
    return series_of(each for each in families if each.name != "hearth_uptime_seconds")


def value(metrics: RequestMetrics, name: str, **labels: str) -> float:
    return values(metrics)[f"hearth_{name}", tuple(sorted(labels.items()))]


def made() -> RequestMetrics:
    return RequestMetrics("1.2", "model")


def ended(metrics: RequestMetrics, request: ParsedRequest, answers: Sequence[AnswerStream]) -> None:
    """Have a local request noted at its end."""
    RecentRequests(metrics).record(request, answers, awake_s())


def answered(usage: Usage | None = USAGE, reason: str = "stop") -> AnswerStream:
    """Return an answer that has ended; without a usage its client has left."""
    answer = AnswerStream("r", lambda _: None)
    answer.receive(Admitted("r", 100))
    if usage is not None:
        answer.receive(Finished("r", reason, None, usage))
    answer.close()
    return answer


def failed(status: int, code: str) -> AnswerStream:
    answer = AnswerStream("r", lambda _: None)
    answer.receive(Failed("r", status, code, "It broke."))
    return answer


async def scraped(made: Front) -> dict[str, Metric]:
    reply = await made.ask("GET", "/metrics")
    assert (reply.status, reply.headers["content-type"]) == (
        200,
        "text/plain; version=0.0.4; charset=utf-8",
    )
    return families_of(reply.content.decode())
