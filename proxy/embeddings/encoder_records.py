"""Counts and remembers what was embedded and ranked, once each, at the end of its reply."""

import logging
from collections.abc import Iterable
from typing import Final

from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hearth.proxy.embeddings.encoders import Encoders
from hearth.proxy.http.http_exchange import ClientGone, HttpExchange
from hearth.proxy.monitoring.gateway_metrics import ANSWERED, served_here
from hearth.proxy.monitoring.recent_requests import RecentRequests
from hearth.proxy.monitoring.request_metrics import CANCELLED, RequestMetrics, outcome_elsewhere
from hearth.proxy.request.encoder_names import KINDS, EncoderNames
from hearth.proxy.request.session_id import key_digest, session_of
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)

_STATES: Final = ("unloaded", "loading", "ready")
_SUMS: Final = {
    "texts": "Texts that were embedded, or documents that were ranked.",
    "tokens": "Tokens of them.",
    "seconds": "From the request to the end of its reply.",
}


class EncoderRecords:
    """Counts replies with vectors and scores. Owner: the event loop. Nothing here waits."""

    def __init__(
        self,
        metrics: RequestMetrics,
        requests: RecentRequests,
        models: Iterable[EncoderNames],
        encoders: Encoders | None,
    ) -> None:
        """`models` are all that embed or rank here; without `encoders` there are none."""
        self._metrics, self._requests, self._encoders = metrics, requests, encoders
        metrics.gateway.know([served_here(model.public) for model in models], is_cloud=False)
        registry = None if encoders is None else metrics.registry
        self._sums = [
            Counter(f"hearth_encoder_{name}", about, ("dialect",), registry=registry)
            for name, about in _SUMS.items()
        ]
        for counter in self._sums:
            for kind in KINDS:  # a series that appears at 1 has no rate
                counter.labels(kind)
        if registry is not None:
            registry.register(self)

    def ended(
        self, exchange: HttpExchange, model: EncoderNames, texts: int, tokens: int, began_at: float
    ) -> None:
        """Count a reply that was sent, or broke off, and write its line in the log.

        `began_at` is of `awake_s`.
        """
        exchange.is_counted = True
        wall_s = awake_s() - began_at
        for counter, value in zip(self._sums, (texts, tokens, wall_s), strict=True):
            counter.labels(model.kind).inc(value)
        error = exchange.broken_by
        outcome = outcome_elsewhere(200 if error is None else error.status, is_whole=error is None)
        served_by = served_here(model.public)
        self._metrics.ended(model.kind, outcome, served_by)
        key = key_digest(exchange.headers)
        speaker = session_of(exchange.headers, {}, key)
        ended = ANSWERED if error is None else error.code
        ended = CANCELLED if isinstance(error, ClientGone) else ended
        row = {
            "id": exchange.request_id,
            "dialect": model.kind,
            "session": speaker.label,
            "client": speaker.client_name,
            "ended": ended,
            "prompt": tokens,
            "wall_ms": round(wall_s * 1000),
            "served_by": served_by,
        }
        self._requests.note_encoded(row, key)
        log.info(
            "request id=%s dialect=%s served_by=%s texts=%d prompt=%d ended=%s wall_ms=%d",
            *(row["id"], model.kind, served_by, texts, tokens, ended, row["wall_ms"]),
        )

    def collect(self) -> Iterable[Metric]:
        """Yield what Prometheus is told of the worker that embeds and ranks."""
        assert self._encoders is not None
        state = GaugeMetricFamily(
            "hearth_encoder_process",
            "1 for the state that the process of EMBEDDING_MODEL and RERANK_MODEL is in.",
            labels=["state"],
        )
        for each in _STATES:
            state.add_metric([each], int(self._encoders.state == each))
        worker = self._encoders.worker
        about = "Requests that wait for it or are computed in it."
        return (
            state,
            GaugeMetricFamily("hearth_encoder_waiting", about, self._encoders.waiting),
            CounterMetricFamily(
                "hearth_encoder_process_starts", "Starts of the process.", worker.starts
            ),
            CounterMetricFamily(
                "hearth_encoder_process_deaths",
                "Ends of the process that nobody asked for.",
                worker.restarts,
            ),
        )
