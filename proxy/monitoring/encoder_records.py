"""Counts and remembers what was embedded and ranked, once each, at the end of its reply."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hearth.proxy.http.http_exchange import ClientGone, HttpExchange
from hearth.proxy.monitoring.gateway_metrics import ANSWERED, served_here
from hearth.proxy.monitoring.recent_requests import RecentRequests
from hearth.proxy.monitoring.request_metrics import (
    CANCELLED,
    RequestMetrics,
    outcome_elsewhere,
)
from hearth.proxy.request.encoder_names import KINDS, EncoderKind
from hearth.proxy.request.session_id import key_digest, session_of
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EncoderReply:
    """What one request had embedded or ranked, once that is done."""

    kind: EncoderKind
    model: str  # the public name
    texts: int
    tokens: int
    began_at: float  # `awake_s`


class ProcessFacts(Protocol):
    """The process that embeds, as far as metrics tell of it."""

    def facts(self) -> dict[str, Any]: ...


class EncoderRecords:
    """Counts replies with vectors and scores. Owner: the event loop. Nothing here waits."""

    def __init__(
        self,
        metrics: RequestMetrics,
        requests: RecentRequests,
        models: Iterable[str],
        process: ProcessFacts | None,
    ) -> None:
        """`models` are the public names of all that embeds or ranks here."""
        self._metrics = metrics
        self._requests = requests
        self._sums: dict[EncoderKind, _Sums] = {kind: _Sums() for kind in KINDS}
        self._process = process
        metrics.gateway.know(map(served_here, models), is_cloud=False)
        if process is not None:
            metrics.registry.register(self)

    def ended(self, exchange: HttpExchange, reply: EncoderReply) -> None:
        """Count a reply that was sent, or broke off, and write its line in the log."""
        exchange.is_counted = True
        wall_s = awake_s() - reply.began_at
        self._sums[reply.kind].add(reply, wall_s)
        error = exchange.broken_by
        outcome = outcome_elsewhere(200 if error is None else error.status, is_whole=error is None)
        served_by = served_here(reply.model)
        self._metrics.answered_elsewhere(reply.kind, outcome, served_by)
        key = key_digest(exchange.headers)
        speaker = session_of(exchange.headers, {}, key)
        ended = ANSWERED if error is None else error.code
        ended = CANCELLED if isinstance(error, ClientGone) else ended
        row = {
            "id": exchange.request_id,
            "dialect": reply.kind,
            "session": speaker.label,
            "client": speaker.client_name,
            "ended": ended,
            "prompt": reply.tokens,
            "wall_ms": round(wall_s * 1000),
            "served_by": served_by,
        }
        self._requests.note_encoded(row, key)
        log.info(
            "request id=%s dialect=%s served_by=%s texts=%d prompt=%d ended=%s wall_ms=%d",
            *(row["id"], reply.kind, served_by, reply.texts, reply.tokens, ended, row["wall_ms"]),
        )

    def collect(self) -> Iterable[Metric]:
        """Yield what Prometheus is told of the process and of what it did."""
        assert self._process is not None
        for name, about in _SUMS.items():
            family = CounterMetricFamily(f"hearth_encoder_{name}", about, labels=["dialect"])
            for kind, sums in self._sums.items():
                family.add_metric([kind], getattr(sums, name))
            yield family
        state = GaugeMetricFamily(
            "hearth_encoder_process",
            "1 for the state that the process of EMBEDDING_MODEL and RERANK_MODEL is in.",
            labels=["state"],
        )
        told = self._process.facts()
        for each in _STATES:
            state.add_metric([each], int(told["state"] == each))
        yield state
        waiting = GaugeMetricFamily(
            "hearth_encoder_waiting", "Requests that wait for it or are computed in it."
        )
        waiting.add_metric([], told["waiting"])
        yield waiting
        for name, about in _LIVES.items():
            lives = CounterMetricFamily(f"hearth_encoder_process_{name}", about)
            lives.add_metric([], told[name])
            yield lives


_STATES: Final = ("unloaded", "loading", "ready")
_LIVES: Final = {
    "starts": "Starts of the process.",
    "deaths": "Ends of the process that nobody asked for.",
}
_SUMS: Final = {
    "texts": "Texts that were embedded, or documents that were ranked.",
    "tokens": "Tokens of them.",
    "seconds": "From the request to the end of its reply.",
}


@dataclass(slots=True)
class _Sums:
    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, reply: EncoderReply, wall_s: float) -> None:
        self.texts += reply.texts
        self.tokens += reply.tokens
        self.seconds += wall_s
