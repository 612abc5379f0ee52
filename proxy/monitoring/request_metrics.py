"""Counts what requests cost, once, as each of them ends; `GET /metrics` gives it to Prometheus.

Every label has a closed set of values: nothing that a client sends becomes one. What the workers
know is asked when somebody looks, and is `worker_metrics`'s.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from hearth.proxy.http.http1_protocol import ConnectionPlaces, Why
from hearth.proxy.monitoring.gateway_metrics import ANSWERED, GatewayMetrics, served_here
from hearth.proxy.monitoring.worker_metrics import WorkerMetrics
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.pool.worker_pool import WorkerReports
from hearth.proxy.request.encoder_names import KINDS as ENCODER_KINDS
from hearth.proxy.request.parsed_request import Dialect
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Usage

PATH: Final = "/metrics"
CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4.encode()  # the text that every tool reads
PREFILL: Final = "prefill"  # among the dialects: a prompt that is read and not answered
_DIALECTS: Final = (*get_args(Dialect), PREFILL, *ENCODER_KINDS)
_FINISHES: Final = ("stop", "length", "tool_calls", "prefilled")
CANCELLED, _REFUSED, _FAILED = "cancelled", "refused_4xx", "failed"
_OUTCOMES: Final = (*_FINISHES, ANSWERED, CANCELLED, _REFUSED, "refused_5xx", _FAILED)
_WORST: Final = (_FAILED, CANCELLED, _REFUSED)  # of several choices' ends
_KINDS: Final = ("main", "agent", "side", "none")
_SOURCES: Final = ("slot", "ram", "ssd", "none")
MATCHES: Final = ("exact", "prefix", "supersequence", "lcp", "miss", "none")
PREFILL_TOKENS_MIN: Final = 64  # the speed of fewer tells of the first step, not of the prefill
DECODE_TOKENS_MIN: Final = 16

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_PREFILL_SPEEDS: Final = (10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000)
_DECODE_SPEEDS: Final = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000)
_SHARES: Final = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1)

# Histograms by the model alone: (name, what it is, where its buckets end).
_OF_MODEL: Final[dict[str, tuple[str, str, Sequence[float]]]] = {
    "queued": (
        "hearth_queue_wait_seconds",
        "From a request's arrival at its worker until it had a slot.",
        _SECONDS,
    ),
    "prefill": (
        "hearth_prefill_tokens_per_second",
        f"Speed at which a prompt was read, where {PREFILL_TOKENS_MIN} tokens or more were.",
        _PREFILL_SPEEDS,
    ),
    "decode": (
        "hearth_decode_tokens_per_second",
        f"Decode speed after the first token, where {DECODE_TOKENS_MIN} or more followed.",
        _DECODE_SPEEDS,
    ),
    "encoder": (
        "hearth_image_encoder_seconds",
        "Time that the image encoder worked for a request, where it did.",
        _SECONDS,
    ),
}


class RequestMetrics:
    """Counts what requests cost. Owner: the event loop. Nothing here waits.

    Invariant: each request and each answer's usage is counted once, whoever left when.
    """

    def __init__(self, version: str, model: str) -> None:
        """`model` is the public name of the one that answers where a request names none."""
        disable_created_metrics()  # type: ignore[no-untyped-call] # series that nobody reads
        self.registry = registry = CollectorRegistry()
        self.model = model
        began = time.monotonic()
        info = Info("hearth_build", "Which Hearth this is.", registry=registry)
        info.info({"version": version})
        uptime = Gauge("hearth_uptime_seconds", "Since the proxy started.", registry=registry)
        uptime.set_function(lambda: time.monotonic() - began)
        self._requests = Counter(
            "hearth_requests_total",
            "Requests that ended, by what came of them; failed: they broke off.",
            ("dialect", "outcome"),
            registry=registry,
        )
        self._disconnects = Counter(
            "hearth_client_disconnects_total",
            "Clients that left before their answer was complete.",
            registry=registry,
        )
        labels = ("session_kind", "source")
        self._tokens = {
            name: Counter(f"hearth_{name}_total", text, labels, registry=registry)
            for name, text in _TOKENS.items()
        }
        self._matches = Counter(
            "hearth_matches_total",
            "Prompts by how they relate to what is kept; none: they never had a slot.",
            ("match", "session_kind"),
            registry=registry,
        )
        self._first_token = Histogram(
            "hearth_time_to_first_token_seconds",
            "From a request's arrival at its worker to its first token.",
            ("model", "source"),
            buckets=_SECONDS,
            registry=registry,
        )
        self._of_model = {
            name: Histogram(metric, text, ("model",), buckets=buckets, registry=registry)
            for name, (metric, text, buckets) in _OF_MODEL.items()
        }
        self._share = Histogram(
            "hearth_match_ratio",
            "Share of a prompt's tokens that was kept.",
            ("session_kind",),
            buckets=_SHARES,
            registry=registry,
        )
        self.gateway = GatewayMetrics(registry, _OUTCOMES)
        self.gateway.know([served_here(model)], is_cloud=False)
        self._workers = WorkerMetrics()
        registry.register(self._workers)
        self._begin()

    def _begin(self) -> None:
        """Have every series there from the start: one that appears at 1 has no rate."""
        for dialect in _DIALECTS:
            for outcome in _OUTCOMES:
                self._requests.labels(dialect, outcome)
        for kind in _KINDS:
            self._share.labels(kind)
            for match in MATCHES:
                self._matches.labels(match, kind)
            for source in _SOURCES:
                for counter in self._tokens.values():
                    counter.labels(kind, source)

    def watch_connections(self, places: ConnectionPlaces) -> None:
        """Tell how many connections are open, and how many this server had to end."""
        open_now = Gauge(
            "hearth_http_connections", "Connections that are open.", registry=self.registry
        )
        open_now.set_function(lambda: len(places))
        closed = Counter(
            "hearth_http_connections_closed_total",
            "Connections that were ended to make room for another (displaced), or because what "
            "they sent was no HTTP (malformed).",
            ["why"],
            registry=self.registry,
        )
        for why in get_args(Why):
            closed.labels(why)
        places.on_closed = lambda why: closed.labels(why).inc()

    def refused(self, dialect: str | None, error: RequestError) -> None:
        """Count a request that ended before a worker had taken it; None = it asked for no text."""
        outcome = failure(error.status)
        self._disconnects.inc(outcome == CANCELLED)
        if dialect is not None:
            self._requests.labels(dialect, outcome).inc()

    def ended(self, dialect: str, outcome: str, served_by: str) -> None:
        """Count a request at its end, by who answered it, or was asked for it last."""
        self._requests.labels(dialect, outcome).inc()
        self._disconnects.inc(outcome == CANCELLED)
        self.gateway.served(served_by, outcome)

    def spent(self, usage: Usage, model: str, *, is_read: bool = True) -> None:
        """Count what one answer cost; its prompt too, where it `is_read` for this one.

        `model` is the public name of what answered; "" = there is one only.
        """
        model = model or self.model
        kind, source = among(_KINDS, usage.session_kind), among(_SOURCES, usage.source)
        for name, counter in self._tokens.items():
            if is_read or name in _OF_ANSWERS:
                counter.labels(kind, source).inc(getattr(usage, name))
        if usage.completion_tokens:
            self._first_token.labels(model, source).observe(usage.ttft_ms / 1000)
        if is_read:
            self._matches.labels(among(MATCHES, usage.match), kind).inc()
            if (share := match_share(usage)) is not None:
                self._share.labels(kind).observe(share)
        observed = {
            "queued": usage.queue_ms / 1000,
            "prefill": prefill_speed(usage),
            "decode": decode_speed(usage),
            "encoder": usage.image_ms / 1000 or None,
        }
        for name, value in observed.items():
            series = self._of_model[name].labels(model)  # there from a model's first answer on
            if value is not None:
                series.observe(value)

    def text(self, workers: Sequence[Mapping[str, Any]], reports: WorkerReports) -> bytes:
        """Return all of it; `workers` are /health's rows, `reports` what each says of its cache."""
        self._workers.workers, self._workers.reports = workers, reports
        return generate_latest(self.registry)


# The fields of Usage that are counted for each answer; the rest is of prompts.
_OF_ANSWERS: Final = (
    *("completion_tokens", "reasoning_tokens", "decode_forwards"),
    *("accepted_prediction_tokens", "rejected_prediction_tokens"),
)


# The fields of Usage that count tokens or forwards, and what each is.
_TOKENS: Final = {
    "prompt_tokens": "Tokens of prompts, of all requests that a worker has told the end of.",
    "cached_tokens": "Of the prompt tokens, those that were kept: not read again.",
    "prefilled_tokens": "Prompt tokens that were read before the first token.",
    "completion_tokens": "Tokens that were sampled, reasoning and ends of turns included.",
    "reasoning_tokens": "Of the completion tokens, those of thinking.",
    "image_tokens": "Of the prompt tokens, those that stand for images.",
    "accepted_prediction_tokens": "Tokens that were drafted and that the model said too.",
    "rejected_prediction_tokens": "Tokens that were drafted and that it did not say.",
    "decode_forwards": "Forwards in which answers' tokens were computed, one by one or more.",
}


def prefill_speed(usage: Usage) -> float | None:
    """Return the tokens that were read a second; None where they are too few to tell.

    The time in the image encoder, which reads no tokens, is left out.
    """
    read_ms = usage.ttft_ms - usage.queue_ms - usage.image_ms
    if usage.prefilled_tokens < PREFILL_TOKENS_MIN or read_ms <= 0:
        return None
    return round(usage.prefilled_tokens * 1000 / read_ms, 1)


def decode_speed(usage: Usage) -> float | None:
    """Return the tokens a second after the first; None where they are too few to tell."""
    decode_ms = usage.finish_ms - usage.ttft_ms
    if usage.completion_tokens <= DECODE_TOKENS_MIN or decode_ms <= 0:
        return None
    return round((usage.completion_tokens - 1) * 1000 / decode_ms, 1)


def forwards_per_token(forwards: int, tokens: int) -> float | None:
    """Return how many forwards a token of answers took; None where they were not counted."""
    return round(forwards / tokens, 3) if forwards and tokens else None


def match_share(usage: Usage) -> float | None:
    """Return the share of a prompt that was kept; None of one that never had a slot."""
    begun = usage.cached_tokens + usage.prefilled_tokens > 0
    return usage.cached_tokens / usage.prompt_tokens if begun and usage.prompt_tokens else None


def outcome_of(answers: Sequence[AnswerStream], broken: RequestError | None) -> str:
    """Return what the end of a request counts as that a worker took: the worst of its answers'."""
    outcomes = [
        word if word in _FINISHES else failure(status, is_taken=True)
        for word, status in (answer.outcome(broken) for answer in answers)
    ]
    return next((each for each in _WORST if each in outcomes), outcomes[0])


def outcome_elsewhere(status: int, *, is_whole: bool) -> str:
    """Return what a request counts as that another server answered with `status`.

    `is_whole` is whether its answer came and went out to its end; 499 = its client left.
    """
    if status < 400:
        return ANSWERED if is_whole else _FAILED
    return failure(status)


def failure(status: int, *, is_taken: bool = False) -> str:
    """Return what a request's end with an HTTP status counts as; taken = by a worker."""
    if status == 499:
        return CANCELLED
    if status < 500:
        return _REFUSED
    return _FAILED if is_taken or status == 500 else "refused_5xx"


def among(values: Sequence[str], value: str) -> str:
    """Return `value`, or "none" where it is not one of `values`."""
    return value if value in values else "none"
