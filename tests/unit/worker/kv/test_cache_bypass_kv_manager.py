"""A request that is not to be kept (use_kv_cache: false) finds nothing and leaves nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.quantise_kv import QuantFormat
from scripts.harness.socketless_worker import ROOT, Answer, Machine, machine
from scripts.harness.warm.token_margins import same_tokens
from tests.helpers.worker.kv_prompts import KINDS, follow, prompt

GB = 1 << 30
PACKED = {"running_format": QuantFormat(8, 32), "running_from": 100}


@pytest.fixture
def disk_thread(tmp_path: Path) -> Iterator[DiskThread]:
    made = DiskThread(FileStore(tmp_path, ROOT, GB, 0))
    yield made
    made.close()


def tiers(warm: Machine, directory: Path | None = None) -> dict[str, Any]:
    """Return all that is kept, as far as anything could find it."""
    keeper, budget = warm.keeper, warm.keeper.store.budget
    return {
        "budget": (budget.bytes_used, budget.buffers_used),
        "extents": [
            (extent.end.name, extent.line.number, extent.line.turns, extent.nbytes)
            for extent in keeper.store.extents
        ],
        "nodes": [
            (node.name, node.resumed, node.is_prompt_end, node.snapshot is not None)
            for node in keeper.store.nodes
        ],
        "slots": [
            (slot.number, slot.tokens.tolist(), list(slot.canonical_cuts), slot.used_at)
            for slot in keeper.slots
        ],
        "lines": [(line.number, line.used_at) for line in keeper.lines.all],
        "counts": dict(keeper.counts),
        "disk": keeper.disk_report(),
        "files": sorted(path.name for path in directory.rglob("*")) if directory else [],
    }


def assert_cold(answer: Answer, cold: Answer) -> None:
    assert answer.usage is not None
    assert (answer.cached, answer.usage.source) == (0, "none")
    assert answer.prefilled == cold.prefilled
    same_tokens(answer, cold)
    for mine, theirs in zip(answer.logits, cold.logits, strict=True):
        assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_no_tier_is_read_or_written(
    name: str, is_exact: bool, disk_thread: DiskThread, tmp_path: Path
) -> None:
    warm, cold = (
        machine(name, is_exact=is_exact, disk_thread=disk_thread),
        machine(name, keeps=False, is_exact=is_exact),
    )
    ids = prompt(name, 150, 100)
    answer = warm.ask(ids)
    warm.work_ahead()
    assert disk_thread.flush(20)
    before = tiers(warm, tmp_path)
    assert before["extents"] and before["slots"] and before["files"]
    for asked in (ids, follow(name, ids, answer.tokens, 30), prompt(name, 40, 40, seed=9)):
        assert_cold(warm.ask(asked, uses_cache=False), cold.ask(asked))
    assert not warm.scheduler.prefill_idle(), "there is nothing to do for them in idle time"
    assert disk_thread.flush(20)
    assert tiers(warm, tmp_path) == before
    warm.check()


def test_what_is_on_disk_is_not_read(disk_thread: DiskThread) -> None:
    ids = prompt("qwen3", 150, 100)
    machine("qwen3", disk_thread=disk_thread).ask(ids)
    assert disk_thread.flush(20)
    warm = machine("qwen3", disk_thread=disk_thread)
    answer = warm.submit(ids, uses_cache=False)
    assert answer.request.kept.recall is None
    warm.run()
    assert warm.settled(answer).cached == 0
    again = warm.submit(ids)
    assert again.request.kept.recall is not None, "it was there to be read"
    warm.run()


def test_running_quantisation_and_growth_are_those_of_a_cold_cache() -> None:
    ids, long = prompt("qwen3", 150, 100), 600  # more than the spare rows that a slot begins with
    warm = machine("qwen3", tiny=True, **PACKED)
    cold = machine("qwen3", tiny=True, **PACKED).ask(ids, long)
    apart = warm.ask(ids, long, uses_cache=False)
    assert_cold(apart, cold)
    raw = machine("qwen3", tiny=True).ask(ids, long)
    assert any(not np.array_equal(a, b) for a, b in zip(raw.logits, cold.logits, strict=False))


@pytest.mark.parametrize("is_kept", [True, False])
def test_neither_waits_for_the_other_nor_takes_over_what_it_reads(is_kept: bool) -> None:
    warm, ids = machine("qwen3"), prompt("qwen3", 300, 100)
    cold = machine("qwen3", keeps=False).ask(ids)
    first = warm.submit(ids, uses_cache=is_kept)
    second = warm.submit(ids, uses_cache=not is_kept)
    warm.step()
    assert first.request.slot is not None and second.request.slot is not None
    warm.run()
    for answer in map(warm.settled, (first, second)):
        assert (answer.cached, answer.prefilled) == (0, cold.prefilled)
        same_tokens(answer, cold)
    assert warm.ask(ids).cached > 0.9 * len(ids), "the kept one is kept"
    warm.check()


def test_one_that_is_cancelled_leaves_nothing() -> None:
    warm = machine("qwen3")
    before = tiers(warm)
    answer = warm.submit(prompt("qwen3", 300, 100), uses_cache=False)
    warm.step()
    answer.request.lease.is_cancelled = True
    warm.run()
    assert answer.reason == "cancelled"
    assert tiers(warm) == before
