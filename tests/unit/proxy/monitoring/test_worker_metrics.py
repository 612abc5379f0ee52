"""Checks the workers' figures in /metrics, and that a worker which does not report is down."""

import logging
from dataclasses import replace
from typing import Any, Final

import pytest
import yaml
from prometheus_client import Metric

from hearth.proxy.monitoring.metrics import RequestMetrics
from hearth.proxy.pool import worker_pool as pool_module
from hearth.shared.errors import Overloaded
from hearth.worker.cache_report import DEPTHS, cache_report
from hearth.worker.kv.kv_manager import NullKVManager
from hearth.worker.schedule.memory_guard import GB, MemoryGuard, Watermark
from hearth.worker.setup.kv_setup import sweep_of
from scripts.harness.socketless_worker import machine
from tests.helpers.cases import DATA_DIR, cases
from tests.helpers.clients.scraped_metrics import families_of
from tests.helpers.proxy.app_over_workers import front
from tests.helpers.proxy.metric_values import scraped

TABLE: Final = "proxy/worker_metrics.yaml"
TOLD: Final = yaml.safe_load((DATA_DIR / TABLE).read_text("utf-8"))


def rows(family: Metric) -> dict[str, float]:
    """Return the values of a family by its labels: "0", or "0 ready"."""
    return {
        " ".join([s.labels["worker"], *(v for k, v in s.labels.items() if k != "worker")]): s.value
        for s in family.samples
    }


@pytest.mark.parametrize("case", cases(TABLE, "cases"))
def test_each_figure_is_told_of_the_worker_that_has_it_as_the_table_says(
    case: dict[str, Any],
) -> None:
    health, cache = [], {}
    for number, worker in enumerate(case["workers"]):
        health.append(TOLD["health"] | worker.get("health", {}) | {"id": number})
        changed = worker.get("cache", {})
        cache[number] = Overloaded("Busy.") if changed is None else TOLD["cache"] | changed
    families = families_of(RequestMetrics("1", "big").text(health, cache).decode())
    for name, wanted in case["values"].items():
        found = rows(families[f"hearth_{name}"])
        assert {label: found.get(label) for label in wanted or found} == wanted, name


async def test_a_worker_that_hangs_is_down_while_the_others_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "STATUS_WAIT_S_MAX", 0.4)

    async with front(2) as made:
        made.stop(1)
        families = await scraped(made)
        assert rows(families["hearth_worker_up"]) == {"0": 1, "1": 0}
        assert rows(families["hearth_cache_bytes"]) == {"0": 0}
        assert rows(families["hearth_requests_running"]) == {"0": 0, "1": 0}


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
