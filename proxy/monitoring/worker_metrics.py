"""Turns the workers' figures of /health and /v1/cache into families of Prometheus metrics.

A worker that has not told is up 0, and its figures are left out rather than shown as they were.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hearth.proxy.pool.worker_pool import WorkerReports
from hearth.shared.errors import RequestError

WorkerRow = Mapping[str, Any]  # what /health or /v1/cache tells of one worker
FigurePath = tuple[str, ...]  # where a figure stands in a worker's report

_HEARD: Final = "heartbeat_age_s"  # None of a worker that nothing is heard of
_EVICTED: Final = ("copy", "images", "window", "snapshot", "extent", "slot", "expired")

# (name, where, what it is), of /health's rows
_OF_HEALTH: Final[tuple[tuple[str, FigurePath, str], ...]] = (
    ("hearth_requests_in_flight", ("in_flight",), "What was asked of a worker and has no end yet."),
    ("hearth_worker_restarts_total", ("restarts",), "Starts of a worker beyond its first."),
    ("hearth_worker_kills_total", ("kills",), "Processes of a worker that hung and were killed."),
    ("hearth_worker_suspects_total", ("suspects",), "Requests that ran as a worker died."),
)
# The same, of what its heartbeat says: one that is away a while has not counted from 0 again.
_OF_HEARTBEAT: Final[tuple[tuple[str, FigurePath, str], ...]] = (
    ("hearth_requests_running", ("running",), "Requests that hold a slot."),
    ("hearth_requests_waiting", ("waiting",), "Requests that wait for a slot."),
    ("hearth_queue_wait_estimate_seconds", ("wait_s",), "Until a request sent now had a slot."),
    ("hearth_worker_heartbeat_age_seconds", (_HEARD,), "Since a worker was heard of."),
    ("hearth_worker_steps_total", ("steps",), "Steps of the scheduler since a worker's start."),
)
# The same of /v1/cache's rows; a worker's counters begin anew with each start of it.
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
    """Collects the families of metrics of one report of each worker. Owner: the event loop."""

    def __init__(self) -> None:
        self.workers: Sequence[WorkerRow] = ()  # /health's
        self.reports: WorkerReports = {}

    def collect(self) -> Iterator[Metric]:
        health = {str(row["id"]): row for row in self.workers}
        reports = {str(number): row for number, row in self.reports.items()}
        cache = {name: row for name, row in reports.items() if not isinstance(row, RequestError)}
        yield from _states(health, cache)
        yield from _families(_OF_HEALTH, health)
        heard = {name: row for name, row in health.items() if row.get(_HEARD) is not None}
        yield from _families(_OF_HEARTBEAT, heard)
        yield from _families(_OF_CACHE, cache)
        # What made way in memory, or went for its age; it is on disk, where there is one.
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
    """Yield a family for each of `figures`, with a sample of each worker that tells it."""
    for name, path, text in figures:
        is_count = name.endswith("_total")
        family_of = CounterMetricFamily if is_count else GaugeMetricFamily
        family = family_of(name, text, labels=("worker",))
        for worker, row in rows.items():
            if (value := _figure(row, path)) is not None:
                family.add_metric((worker,), value)
        yield family


def _figure(row: Any, path: FigurePath) -> float | None:
    """Return the number at `path`; of a list its length, 0 where a count has not begun."""
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
