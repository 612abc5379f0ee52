"""Checks the workers' figures in /metrics, and that a worker which does not report is down."""

import logging
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import Metric

from hearth.proxy.monitoring.request_metrics import RequestMetrics
from hearth.proxy.pool import worker_link as link_module
from hearth.shared.errors import Overloaded
from hearth.worker.cache_report import DEPTHS, cache_report
from hearth.worker.kv.null_kv_manager import NullKVManager
from hearth.worker.schedule.memory_guard import GB, MemoryGuard, Watermark
from hearth.worker.setup.kv_setup import sweep_of
from scripts.harness.socketless_worker import machine
from tests.helpers.clients.scraped_metrics import families_of
from tests.helpers.proxy.app_over_workers import front
from tests.helpers.proxy.metric_values import scraped

HEALTH: dict[str, Any] = {
    "id": 0,
    "state": "ready",
    "restarts": 2,
    "kills": 1,
    "running": 1,
    "waiting": 3,
    "wait_s": 1.5,
    "in_flight": 4,
    "steps": 77,
    "heartbeat_age_s": 0.5,
    "model": "big",
}
CACHE: dict[str, Any] = {
    "bytes": 81,
    "budget_bytes": 100,
    "slots": [{"slot": 0}, {"slot": 1}],
    "memory_bytes": 80,
    "memory_limit_bytes": 100,
    "counts": {"vlm_retreat": 0, "hybrid_trim_miss": 5},
    "sessions": {"canonical_drift": 1, "exact_key_rejected_by_model_lcp": 2},
    "disk": {"bytes_used": 9, "counts": {"writes": 1}}
    | {"bytes_written_today": 6, "write_bytes_per_day": 10, "write_bytes_left": 4},
    "vision": None,
    "evicted": {"count": {"copy": 3}},
    "answers_running": 2,
    "answers_tokens_per_s": 41.5,
}


def told(health: list[dict[str, Any]], cache: dict[int, Any]) -> dict[str, Metric]:
    return families_of(RequestMetrics("1", "big").text(health, cache).decode())


def rows(family: Metric) -> dict[str, float]:
    """Return the values of a family by its labels: "0", or "0 ready"."""
    return {
        " ".join([s.labels["worker"], *(v for k, v in s.labels.items() if k != "worker")]): s.value
        for s in family.samples
    }


def test_each_figure_is_told_of_the_worker_that_has_it() -> None:
    families = told([HEALTH, HEALTH | {"id": 1, "waiting": 0}], {0: CACHE, 1: CACHE | {"bytes": 7}})
    found = {name: rows(families[f"hearth_{name}"]) for name in ("requests_waiting", "cache_bytes")}
    assert found == {"requests_waiting": {"0": 3, "1": 0}, "cache_bytes": {"0": 81, "1": 7}}
    assert rows(families["hearth_live_slots"]) == {"0": 2, "1": 2}, "a list counts by its rows"
    assert rows(families["hearth_hybrid_trim_miss"])["0"] == 5
    assert rows(families["hearth_exact_key_rejected_by_model_lcp"])["0"] == 2
    assert rows(families["hearth_disk_evictions"])["0"] == 0, "a count that has not begun"
    assert rows(families["hearth_worker_model_info"]) == {"0 big": 1, "1 big": 1}
    assert rows(families["hearth_evictions"])["0 copy"] == 3
    assert rows(families["hearth_evictions"])["0 extent"] == 0
    assert rows(families["hearth_answers_running"])["0"] == 2
    assert rows(families["hearth_answers_tokens_per_second"])["1"] == 41.5


def test_what_a_worker_does_not_have_is_left_out() -> None:
    families = told([HEALTH | {"wait_s": None, "model": None}], {0: {"reuses": False}})
    absent: tuple[str, ...] = ("cache_bytes", "disk_bytes", "vision_encoder_calls")
    absent += ("queue_wait_estimate_seconds",)
    for name in (*absent, "answers_running", "worker_model_info", "evictions"):
        assert families[f"hearth_{name}"].samples == []


@pytest.mark.parametrize("answer", [{}, {0: Overloaded("It is in a long forward.")}])
def test_a_worker_that_does_not_tell_is_down(answer: Any) -> None:
    families = told([HEALTH | {"state": "restarting"}], answer)
    assert rows(families["hearth_worker_up"]) == {"0": 0}
    assert rows(families["hearth_worker_restarts"]) == {"0": 2}
    assert rows(families["hearth_worker_kills"]) == {"0": 1}
    assert families["hearth_cache_bytes"].samples == []


async def test_a_worker_that_hangs_is_down_while_the_others_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "STATUS_WAIT_S_MAX", 0.4)

    async with front(2) as made:
        made.stop(1)
        families = await scraped(made)
        assert rows(families["hearth_worker_up"]) == {"0": 1, "1": 0}
        assert rows(families["hearth_cache_bytes"]) == {"0": 0}
        assert rows(families["hearth_requests_running"]) == {"0": 0, "1": 0}


def test_a_worker_that_is_away_has_not_begun_to_count_anew() -> None:
    away = HEALTH | {"id": 1, "heartbeat_age_s": None, "steps": 0, "running": 0, "waiting": 0}
    families = told([HEALTH, away], {})
    for name in ("hearth_worker_steps", "hearth_requests_running", "hearth_requests_waiting"):
        assert list(rows(families[name])) == ["0"], name
    assert rows(families["hearth_worker_restarts"]) == {"0": 2, "1": 2}
    assert rows(families["hearth_worker_up"]) == {"0": 0, "1": 0}


def test_a_budget_over_80_percent_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    used = [8 * GB]
    mark = Watermark("Kept KV", "CACHE_RAM_BUDGET_MB", used.pop, lambda: 10 * GB)
    mark.check()
    assert not caplog.records
    used.append(8 * GB + 1)
    mark.check()
    assert "8.00 of 10.00 GB are used, over 80 %" in caplog.text
    assert "CACHE_RAM_BUDGET_MB" in caplog.text and caplog.records[0].levelno == logging.WARNING
    used.append(9 * GB)
    mark.check()
    assert len(caplog.records) == 1


def test_a_worker_looks_at_its_memory_and_its_kept_kv_when_it_sweeps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    full = machine("qwen3", tiny=True, budget_mb=0.5, slots_max=1)
    sweep = sweep_of(full.keeper, MemoryGuard(lambda: 10, lambda: 9))
    assert not sweep() and caplog.text.count("Memory: ") == 1 and "Kept KV" not in caplog.text
    for first in range(8):
        full.ask([*range(first, first + 150)], 2)
    assert full.keeper.evictions > 0 and not sweep() and not sweep()
    assert (caplog.text.count("Memory: "), caplog.text.count("Kept KV: ")) == (1, 1)
    full.keeper.slots[0].used_at -= 10**6
    full.keeper.rules = replace(full.keeper.rules, session_idle_s=1.0)
    assert sweep(), "old slots go all the same"
    assert sweep_of(NullKVManager(list), MemoryGuard(lambda: 10, lambda: 1))() is False


def test_a_report_counts_every_entry_by_its_depth_and_what_was_evicted() -> None:
    small = machine("qwen3", tiny=True, budget_mb=0.5, slots_max=1)
    for first in range(8):
        small.ask([*range(first, first + 1_100 if first == 7 else first + 150)], 2)
    report = cache_report(small.keeper, 0)
    assert len(report["depths"]) == len(DEPTHS) + 1
    assert sum(report["depths"].values()) == len(report["entries"])
    assert report["depths"]["1024-4095"] == 1
    evicted = report["evicted"]
    assert sum(evicted["count"].values()) == report["evictions"] > 0
    assert sum(evicted["bytes"].values()) > 0
