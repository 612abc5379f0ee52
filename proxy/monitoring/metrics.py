"""Counts the cost of each request once, at its end. `GET /metrics` gives Prometheus the sums.

Every label has a closed set of values: the deployments of LiteLLM's config, and words of Hearth. No
text of a client becomes a label. At each scrape the workers report, and the figures of /health
and /v1/cache become families of metrics. A worker without a report has `up` 0 and no old figures.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from hearth.proxy.http.http1_protocol import CloseReason, ConnectionSlots
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.pool.worker_pool import WorkerReports
from hearth.proxy.request.encoder_names import KINDS as ENCODER_KINDS
from hearth.proxy.request.parsed_request import Dialect
from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Usage

ANSWERED: Final = "answered"  # outcome of a whole cloud answer; local answers have finish reasons
OTHER: Final = "other"  # label of names outside the config and of causes outside CAUSES
# Reasons why a request went on to another deployment, worded as in the header and the log.
CAUSES: Final = (
    *("overloaded", "prompt_too_long", "model_not_loadable", "worker_lost"),
    *("cloud_error", "timeout", "over_budget", "rate_limited", "content_policy", OTHER),
)
LOST: Final = ("dropped", "failed")


def served_here(model: str) -> str:
    """Return the name of a local model as the answering server, for header, log and metrics."""
    return f"hearth/{model}"


@dataclass(frozen=True, slots=True)
class CloudUsage:
    """The cost of one cloud call as LiteLLM logged it; `cost` is in US dollars."""

    request_id: str
    deployment_id: str
    prompt_tokens: int
    cached_tokens: int  # part of prompt_tokens, read from the provider's cache
    completion_tokens: int
    cost: float


class GatewayMetrics:
    """Counts the gateway's decisions. Owner: the event loop. No method waits."""

    def __init__(self, registry: CollectorRegistry, outcomes: Iterable[str]) -> None:
        """`outcomes` are the outcomes that a request may have."""
        self._outcomes = tuple(dict.fromkeys((*outcomes, ANSWERED)))
        self._served_by: set[str] = set()
        self._served = Counter(
            "hearth_served_requests_total",
            "Requests that ended, by who answered, or was asked last, and what came of them.",
            ("served_by", "outcome"),
            registry=registry,
        )
        self._fallbacks = Counter(
            "hearth_fallbacks_total",
            "How often a request went on to another deployment, by why.",
            ("cause",),
            registry=registry,
        )
        self._tokens = {
            name: Counter(f"hearth_cloud_{name}_total", text, ("served_by",), registry=registry)
            for name, text in _CLOUD_TOKENS.items()
        }
        self._cost = Counter(
            "hearth_cloud_cost_dollars_total",
            "What answers from elsewhere cost, by LiteLLM's prices.",
            ("served_by",),
            registry=registry,
        )
        self._lost = Counter(
            "hearth_callback_logs_lost_total",
            "Local answers that LiteLLM's callbacks were not told of.",
            ("why",),
            registry=registry,
        )
        for cause in CAUSES:
            self._fallbacks.labels(cause)
        for why in LOST:
            self._lost.labels(why)

    def add_servers(self, served_by: Iterable[str], *, is_cloud: bool) -> None:
        """Add the servers `served_by` as labels, each with its series.

        A series must start at 0: a series that appears at 1 has no rate.
        """
        for name in served_by:
            self._served_by.add(name)
            for outcome in self._outcomes:
                self._served.labels(name, outcome)
            for counter in (*self._tokens.values(), self._cost) if is_cloud else ():
                counter.labels(name)

    def served(self, served_by: str, outcome: str) -> None:
        """Count a request at its end, by the server that answered it or was asked last."""
        word = outcome if outcome in self._outcomes else OTHER
        self._served.labels(self._known(served_by), word).inc()

    def fell_back(self, cause: str) -> None:
        """Count a request that goes on to another deployment."""
        self._fallbacks.labels(cause if cause in CAUSES else OTHER).inc()

    def spent(self, served_by: str, usage: CloudUsage) -> None:
        """Count the cost of one cloud call, whether its answer was used or not."""
        name = self._known(served_by)
        for field, counter in self._tokens.items():
            counter.labels(name).inc(getattr(usage, field))
        self._cost.labels(name).inc(usage.cost)

    def log_lost(self, why: str) -> None:
        """Count a local answer that LiteLLM's callbacks did not receive; `why` is one of LOST."""
        self._lost.labels(why).inc()

    def _known(self, served_by: str) -> str:
        return served_by if served_by in self._served_by else OTHER


_CLOUD_TOKENS: Final = {
    "prompt_tokens": "Tokens of prompts that were read elsewhere.",
    "cached_tokens": "Of them, those that a provider had kept.",
    "completion_tokens": "Tokens that were written elsewhere.",
}


WorkerRow = Mapping[str, Any]  # a worker's row in /health or /v1/cache
FigurePath = tuple[str, ...]  # path to a figure in a worker's report

_HEARTBEAT_AGE: Final = "heartbeat_age_s"  # None for a worker without a heartbeat
_EVICTED: Final = ("copy", "images", "window", "snapshot", "extent", "slot", "expired")

# (metric, path, description) of figures in /health's rows
_OF_HEALTH: Final[tuple[tuple[str, FigurePath, str], ...]] = (
    ("hearth_requests_in_flight", ("in_flight",), "What was asked of a worker and has no end yet."),
    ("hearth_worker_restarts_total", ("restarts",), "Starts of a worker beyond its first."),
    ("hearth_worker_kills_total", ("kills",), "Processes of a worker that hung and were killed."),
    ("hearth_worker_suspects_total", ("suspects",), "Requests that ran as a worker died."),
)
# (metric, path, description) of figures in heartbeats, left out while no heartbeat comes
_OF_HEARTBEAT: Final[tuple[tuple[str, FigurePath, str], ...]] = (
    ("hearth_requests_running", ("running",), "Requests that hold a slot."),
    ("hearth_requests_waiting", ("waiting",), "Requests that wait for a slot."),
    ("hearth_queue_wait_estimate_seconds", ("wait_s",), "Until a request sent now had a slot."),
    ("hearth_worker_heartbeat_age_seconds", (_HEARTBEAT_AGE,), "Since a worker was heard of."),
    ("hearth_worker_steps_total", ("steps",), "Steps of the scheduler since a worker's start."),
)
# (metric, path, description) of figures in /v1/cache's rows. A worker's counters start at 0.
_OF_CACHE: Final[tuple[tuple[str, FigurePath, str], ...]] = (
    ("hearth_memory_bytes", ("memory_bytes",), "What a worker takes: MLX's arrays and all else."),
    ("hearth_memory_limit_bytes", ("memory_limit_bytes",), "What it may take of its machine."),
    ("hearth_process_bytes", ("process_bytes",), "What the system counts as a worker's memory."),
    (
        "hearth_beside_arrays_bytes",
        ("beside_arrays_bytes",),
        "What of hearth_memory_bytes is not MLX's: sessions, tokens, libraries.",
    ),
    (
        "hearth_memory_pressure",
        ("pressure", "severity"),
        "The system's: 0 = normal, 1 = warning, 2 = critical. macOS alone tells.",
    ),
    ("hearth_memory_sheds_total", ("pressure", "sheds"), "Times that kept KV went for it."),
    ("hearth_memory_shed_bytes_total", ("pressure", "shed_bytes"), "Kept KV that went for it."),
    ("hearth_cache_bytes", ("bytes",), "Kept KV in memory, live slots beside it."),
    ("hearth_cache_budget_bytes", ("budget_bytes",), "What kept KV may take in memory."),
    ("hearth_cache_pinned_bytes", ("pinned_bytes",), "Kept KV that no other makes way."),
    ("hearth_cache_extents", ("extents",), "Runs of KV that are kept."),
    ("hearth_cache_snapshots", ("snapshots",), "States and windows that can be resumed from."),
    ("hearth_live_slots", ("slots",), "Live caches, idle ones included."),
    ("hearth_live_slots_max", ("slots_max",), "Live caches that there may be."),
    ("hearth_requests_running_max", ("running_max",), "Requests that may compute at once."),
    ("hearth_live_slots_bytes", ("slots_bytes",), "What live caches take, batches included."),
    ("hearth_trunks", ("trunks", "count"), "Beginnings of prompts whose KV answers share."),
    ("hearth_trunk_rows", ("trunks", "rows"), "Answers that share the KV they begin with."),
    ("hearth_trunk_spared_bytes", ("trunks", "spared_bytes"), "What they would take more alone."),
    ("hearth_answers_running", ("answers_running",), "Answers that are written now."),
    (
        "hearth_answers_tokens_per_second",
        ("answers_tokens_per_s",),
        "Speed of all that are written now, each since its first token.",
    ),
    ("hearth_disk_bytes", ("disk", "bytes_used"), "Kept KV on disk, of a worker's model."),
    (
        "hearth_disk_directory_bytes",
        ("disk", "directory_bytes_used"),
        "Kept KV on disk, of all models that share KV_CACHE_DIR.",
    ),
    ("hearth_disk_budget_bytes", ("disk", "bytes_max"), "What all of that may take."),
    (
        "hearth_disk_written_today_bytes",
        ("disk", "bytes_written_today"),
        "Written since midnight UTC, by all that share KV_CACHE_DIR.",
    ),
    (
        "hearth_disk_write_left_bytes",
        ("disk", "write_bytes_left"),
        "What all of them may still write until then, where KV_DISK_WRITE_GB_PER_DAY limits it.",
    ),
    ("hearth_disk_files", ("disk", "files"), "Files of kept KV, of a worker's model."),
    ("hearth_disk_queue_bytes", ("disk", "queue_bytes"), "What waits to be written."),
    ("hearth_disk_written_bytes_total", ("disk", "counts", "bytes_written"), "Written to disk."),
    ("hearth_disk_reads_total", ("disk", "counts", "reads"), "Files that were read."),
    ("hearth_disk_evictions_total", ("disk", "counts", "evictions"), "Files that made way."),
    (
        "hearth_disk_evicted_bytes_total",
        ("disk", "counts", "bytes_evicted"),
        "What the files that made way held.",
    ),
    (
        "hearth_exact_key_rejected_by_model_lcp_total",
        ("sessions", "exact_key_rejected_by_model_lcp"),
        "Losses that nothing explains; more than 0 is a bug.",
    ),
    (
        "hearth_canonical_drift_total",
        ("sessions", "canonical_drift"),
        "Losses to what a client changed of a conversation that is the same.",
    ),
    ("hearth_lost_tokens_total", ("sessions", "lost_tokens"), "Tokens that all losses cost."),
    (
        "hearth_hybrid_trim_miss_total",
        ("counts", "hybrid_trim_miss"),
        "Prompts whose rows were kept further than states or windows allow to resume.",
    ),
    ("hearth_vlm_retreat_total", ("counts", "vlm_retreat"), "Plans that went on amid an image."),
    ("hearth_idle_prefilled_tokens_total", ("idle_tokens",), "Tokens read in idle time."),
    (
        "hearth_idle_reread_tokens_total",
        ("idle", "again"),
        "Of them, those that had been read before: once more, to be canonical.",
    ),
    ("hearth_watchdog_ends_total", ("ends", "watchdog_ends"), "Requests that had had their time."),
    ("hearth_memory_ends_total", ("ends", "memory_ends"), "Answers that outgrew the memory."),
    ("hearth_memory_refusals_total", ("ends", "memory_refusals"), "Prompts that had no room."),
    (
        "hearth_pressure_refusals_total",
        ("ends", "pressure_refusals"),
        "Prompts that the system had no memory for, for a minute.",
    ),
    (
        "hearth_prompts_suspects",
        ("suspects", "suspects"),
        "Prompts that a worker died with, and that are retried alone.",
    ),
    ("hearth_prompts_refused", ("suspects", "refused"), "Prompts that two workers died with."),
    ("hearth_poison_refusals_total", ("suspects", "refusals"), "Requests refused for that."),
    ("hearth_vision_encoder_calls_total", ("vision", "encoder_calls"), "Images encoded."),
    ("hearth_vision_encoder_seconds_total", ("vision", "encoder_s"), "Spent on encoding images."),
    ("hearth_vision_failures_total", ("vision", "failures"), "Images that could not be encoded."),
    (
        "hearth_grammar_refusals_total",
        ("grammars", "refused"),
        "Requests whose schemas or tools could not be enforced.",
    ),
    (
        "hearth_grammar_ends_total",
        ("grammars", "ended"),
        "Grammars that passed a limit of time or memory while they were compiled.",
    ),
    (
        "hearth_grammar_answer_ends_total",
        ("grammars", "answers_ended"),
        "Answers whose grammar could not go on.",
    ),
    (
        "hearth_speculation_forwards_total",
        ("speculation", "forwards"),
        "Forwards of answers that were drafted for, with drafts or without one.",
    ),
    ("hearth_speculation_rows_total", ("speculation", "rows"), "Tokens that those were fed."),
    ("hearth_speculation_tokens_total", ("speculation", "tokens"), "Tokens that came of them."),
    (
        "hearth_speculation_speedup_ratio",
        ("speculation", "speedup_estimate"),
        "Estimated speed of decoding over that without drafts.",
    ),
    ("hearth_wire_waiting_frames", ("wire_waiting_frames",), "Messages a worker has yet to send."),
)


class WorkerMetrics(Collector):
    """Collects the families of metrics from one report of each worker. Owner: the event loop."""

    def __init__(self) -> None:
        self.workers: Sequence[WorkerRow] = ()  # rows of /health
        self.reports: WorkerReports = {}

    def collect(self) -> Iterator[Metric]:
        health = {str(row["id"]): row for row in self.workers}
        reports = {str(number): row for number, row in self.reports.items()}
        cache = {name: row for name, row in reports.items() if not isinstance(row, RequestError)}
        yield from _states(health, cache)
        yield from _families(_OF_HEALTH, health)
        alive = {name: row for name, row in health.items() if row.get(_HEARTBEAT_AGE) is not None}
        yield from _families(_OF_HEARTBEAT, alive)
        yield from _families(_OF_CACHE, cache)
        # Evictions from memory, for space or for age. With a disk tier, the KV is on disk.
        evicted = CounterMetricFamily(
            "hearth_evictions_total", "What made way in memory.", labels=("worker", "what")
        )
        for worker, row in cache.items():
            for name in _EVICTED:
                if (value := _figure(row, ("evicted", "count", name))) is not None:
                    evicted.add_metric((worker, name), value)
        yield evicted


def _families(
    figures: Sequence[tuple[str, FigurePath, str]], rows: Mapping[str, WorkerRow]
) -> Iterator[Metric]:
    """Yield a family for each of `figures`, with a sample from each worker that reports it."""
    for name, path, text in figures:
        is_count = name.endswith("_total")
        family_of = CounterMetricFamily if is_count else GaugeMetricFamily
        family = family_of(name, text, labels=("worker",))
        for worker, row in rows.items():
            if (value := _figure(row, path)) is not None:
                family.add_metric((worker,), value)
        yield family


def _figure(row: Any, path: FigurePath) -> float | None:
    """Return the figure at `path`: a number, a list's length, or 0 for a missing counter."""
    for name in path[:-1]:
        row = row.get(name)
        if not isinstance(row, Mapping):
            return None
    value = row.get(path[-1], 0 if len(path) > 1 else None)
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int | float) else None


def _states(health: Mapping[str, WorkerRow], cache: Mapping[str, WorkerRow]) -> Iterator[Metric]:
    up = GaugeMetricFamily("hearth_worker_up", "1: a worker told its figures.", labels=("worker",))
    model = GaugeMetricFamily(
        "hearth_worker_model_info", "Which model a worker has.", labels=("worker", "model")
    )
    for worker, row in health.items():
        up.add_metric((worker,), worker in cache)
        if row.get("model"):
            model.add_metric((worker, row["model"]), 1)
    yield from (up, model)


PATH: Final = "/metrics"
CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4.encode()  # the format that every tool reads
PREFILL: Final = "prefill"  # dialect label of a prompt that is prefilled and not answered
_DIALECTS: Final = (*get_args(Dialect), PREFILL, *ENCODER_KINDS)
_FINISHES: Final = ("stop", "length", "tool_calls", "prefilled")
CANCELLED, _REFUSED, _FAILED = "cancelled", "refused_4xx", "failed"
_OUTCOMES: Final = (*_FINISHES, ANSWERED, CANCELLED, _REFUSED, "refused_5xx", _FAILED)
_WORST: Final = (_FAILED, CANCELLED, _REFUSED)  # worst first, among several choices' outcomes
_KINDS: Final = ("main", "agent", "side", "none")
_SOURCES: Final = ("slot", "ram", "ssd", "none")
MATCHES: Final = ("exact", "prefix", "supersequence", "lcp", "miss", "none")
PREFILL_TOKENS_MIN: Final = 64  # with fewer tokens, the first step takes most of the time
DECODE_TOKENS_MIN: Final = 16

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_PREFILL_SPEEDS: Final = (10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000)
_DECODE_SPEEDS: Final = (1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1_000)
_SHARES: Final = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1)

# Histograms labelled by the model alone: (metric, description, upper bounds of buckets).
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
    """Counts what requests cost. Owner: the event loop. No method waits.

    Invariant: each request and each answer's usage is counted once, even if a client leaves early.
    """

    def __init__(self, version: str, model: str) -> None:
        """`model` is the public name of the model for requests that name no model."""
        disable_created_metrics()  # type: ignore[no-untyped-call] # unused series
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
        self.gateway.add_servers([served_here(model)], is_cloud=False)
        self._workers = WorkerMetrics()
        registry.register(self._workers)
        self._begin()

    def _begin(self) -> None:
        """Create every series at the start: a series that appears at 1 has no rate."""
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

    def watch_connections(self, slots: ConnectionSlots) -> None:
        """Report how many connections are open, and how many this server had to close."""
        open_now = Gauge(
            "hearth_http_connections", "Connections that are open.", registry=self.registry
        )
        open_now.set_function(lambda: len(slots))
        closed = Counter(
            "hearth_http_connections_closed_total",
            "Connections that were ended to make room for another (displaced), or because what "
            "they sent was no HTTP (malformed).",
            ["why"],
            registry=self.registry,
        )
        for why in get_args(CloseReason):
            closed.labels(why)
        slots.on_closed = lambda why: closed.labels(why).inc()

    def refused(self, dialect: str | None, error: RequestError) -> None:
        """Count a request that ended before a worker took it; `dialect` None = not for text."""
        outcome = failure(error.status)
        self._disconnects.inc(outcome == CANCELLED)
        if dialect is not None:
            self._requests.labels(dialect, outcome).inc()

    def ended(self, dialect: str, outcome: str, served_by: str) -> None:
        """Count a request at its end, by the server that answered it or was asked last."""
        self._requests.labels(dialect, outcome).inc()
        self._disconnects.inc(outcome == CANCELLED)
        self.gateway.served(served_by, outcome)

    def spent(self, usage: Usage, model: str, *, is_read: bool = True) -> None:
        """Count the cost of one answer, and with `is_read` the prompt that was read for it.

        `model` is the public name of the model that answered; "" = the only model.
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
            series = self._of_model[name].labels(model)  # created by a model's first answer
            if value is not None:
                series.observe(value)

    def text(self, workers: Sequence[Mapping[str, Any]], reports: WorkerReports) -> bytes:
        """Return all metrics.

        `workers` are rows of /health, and `reports` are the workers' cache reports.
        """
        self._workers.workers, self._workers.reports = workers, reports
        return generate_latest(self.registry)


# Fields of Usage that are counted for each answer; the other fields belong to the prompt.
_OF_ANSWERS: Final = (
    *("completion_tokens", "reasoning_tokens", "decode_forwards"),
    *("accepted_prediction_tokens", "rejected_prediction_tokens"),
)


# Fields of Usage that count tokens or forwards, with a description.
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
    """Return the tokens prefilled per second; None if they are too few to measure.

    The time in the image encoder, which reads no tokens, is left out.
    """
    read_ms = usage.ttft_ms - usage.queue_ms - usage.image_ms
    if usage.prefilled_tokens < PREFILL_TOKENS_MIN or read_ms <= 0:
        return None
    return round(usage.prefilled_tokens * 1000 / read_ms, 1)


def decode_speed(usage: Usage) -> float | None:
    """Return the tokens per second after the first token; None if they are too few to measure."""
    decode_ms = usage.finish_ms - usage.ttft_ms
    if usage.completion_tokens <= DECODE_TOKENS_MIN or decode_ms <= 0:
        return None
    return round((usage.completion_tokens - 1) * 1000 / decode_ms, 1)


def forwards_per_token(forwards: int, tokens: int) -> float | None:
    """Return the forwards per token of answers; None if the forwards were not counted."""
    return round(forwards / tokens, 3) if forwards and tokens else None


def match_share(usage: Usage) -> float | None:
    """Return the share of a prompt that was cached; None if the request never had a slot."""
    begun = usage.cached_tokens + usage.prefilled_tokens > 0
    return usage.cached_tokens / usage.prompt_tokens if begun and usage.prompt_tokens else None


def outcome_of(answers: Sequence[AnswerStream], broken: RequestError | None) -> str:
    """Return the outcome of a request that a worker took: the worst outcome of its answers."""
    outcomes = [
        word if word in _FINISHES else failure(status, is_taken=True)
        for word, status in (answer.outcome(broken) for answer in answers)
    ]
    return next((outcome for outcome in _WORST if outcome in outcomes), outcomes[0])


def outcome_elsewhere(status: int, *, is_whole: bool) -> str:
    """Return the outcome of a request that another server answered with `status`.

    `is_whole` says whether the answer was sent on to its end. 499 = the client left.
    """
    if status < 400:
        return ANSWERED if is_whole else _FAILED
    return failure(status)


def failure(status: int, *, is_taken: bool = False) -> str:
    """Return the outcome of a request that ended with `status`; `is_taken` = a worker took it."""
    if status == 499:
        return CANCELLED
    if status < 500:
        return _REFUSED
    return _FAILED if is_taken or status == 500 else "refused_5xx"


def among(values: Sequence[str], value: str) -> str:
    """Return `value`, or "none" if it is not one of `values`."""
    return value if value in values else "none"
