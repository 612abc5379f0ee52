"""The context that fits beside the weights, and what a start says where it is short."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.forward_memory import ForwardMemory
from hearth.worker.engine.mlx_memory import GB, working_bytes
from hearth.worker.engine.system_state import MemoryUse
from hearth.worker.kv.kv_manager import NullKVManager
from hearth.worker.setup import memory_setup
from hearth.worker.setup.kv_setup import live_slots_max, running_max
from hearth.worker.setup.memory_setup import WorkerMemory, divide_room, fitting_tokens
from scripts.harness.socketless_worker import loaded, machine

MB = 1 << 20


@given(
    st.integers(1, 300_000),
    st.integers(-5_000, 10**9),
    st.integers(1, 50_000),
    st.builds(ForwardMemory, st.just(PrefillGrid(512)), st.integers(0, 10**5), st.integers(0, 64)),
)
def test_what_is_told_fits_and_a_token_more_does_not(
    longest: int, room: int, row_bytes: int, forward: ForwardMemory
) -> None:
    def cost(tokens: int) -> int:
        return tokens * row_bytes + forward.bytes_at(tokens)

    tokens = fitting_tokens(longest, room, lambda count: count * row_bytes, forward)
    assert 0 <= tokens <= longest
    assert tokens == 0 or cost(tokens) <= room
    assert tokens == longest or cost(tokens + 1) > room


def memory_of(limit_mb: int, tmp_path: Path) -> WorkerMemory:
    settings = load_settings({"MEMORY_LIMIT_MB": str(limit_mb)}, None)
    return WorkerMemory(settings, f"ipc://{tmp_path}/worker-0.sock")


def test_a_model_is_told_with_the_context_that_fits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded("qwen3", tiny=True)
    model = replace(model, facts=replace(model.facts, context_tokens=100_000))
    memory = memory_of(4_000, tmp_path)
    used = memory.use.bytes_used()
    room = 4_000 * MB - used - working_bytes(4_000 * MB)
    row_bytes = int(room / (1 + memory.use.overhead)) // 5_000
    with caplog.at_level(logging.WARNING, "hearth.worker"):
        fitted = memory.fit(model, lambda tokens: tokens * row_bytes, ForwardMemory())
    assert 4_900 <= fitted.facts.context_tokens <= 5_100
    assert fitted.facts.context_by == "memory"
    assert "not 100,000" in caplog.text and "3.9 GB" in caplog.text
    assert memory.fit(model, lambda _: 0, ForwardMemory()) is model


def test_a_machine_that_hardly_anything_fits_refuses_with_the_figures(tmp_path: Path) -> None:
    model = loaded("qwen3", tiny=True)
    with pytest.raises(StartError, match=r"context of \d+ tokens fits into 3\.9 GB.*KV_BITS=8"):
        memory_of(4_000, tmp_path).fit(model, lambda tokens: tokens * 100 * MB, ForwardMemory())


def test_kept_kv_follows_the_workers_share_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_setup, "MEASURE_S", 0.0)
    monkeypatch.setattr(mlx_memory, "recommended_bytes", lambda: 1 << 40)
    monkeypatch.setattr(mlx_memory, "set_memory_limit", lambda limit: None)
    settings = load_settings({"MEMORY_LIMIT_MB": "64000", "WORKERS": "2"}, None)
    one, other = (
        WorkerMemory(settings, f"ipc://{tmp_path}/worker-{number}.sock") for number in range(2)
    )
    keeper = machine("qwen3", tiny=True).keeper
    budget = keeper.store.budget
    # What other tests have left in this process decides nothing.
    one.use = MemoryUse(lambda: 1_000 * MB, lambda: 1_000 * MB, lambda: 0)
    one.share.claim(1_000 * MB)
    one.share_out(keeper, 100, ForwardMemory())
    alone = budget.bytes_max
    assert alone == pytest.approx(0.75 * 31_000 * MB, rel=0.15)
    assert keeper.idle_bytes_max == pytest.approx(alone / 6, rel=0.01)
    other.share.claim(30_000 * MB)
    one.measure()
    assert 0.4 * alone < budget.bytes_max < 0.6 * alone
    other.share.release()
    one.measure()
    assert budget.bytes_max == alone


@pytest.mark.parametrize(
    ("environ", "mb"),
    [
        ({"MEMORY_LIMIT_MB": "16000"}, 512),
        ({"MEMORY_LIMIT_MB": "16000", "CACHE_RAM_BUDGET_MB": "900"}, 900),
        ({"MEMORY_LIMIT_MB": "16000", "WORKERS": "2"}, 256),
        ({"MEMORY_LIMIT_MB": "16000", "WORKERS": "2", "CACHE_RAM_BUDGET_MB": "900"}, 900),
    ],
)
def test_a_cpu_keeps_little_and_the_setting_is_taken_as_it_is(
    environ: dict[str, str], mb: int, tmp_path: Path
) -> None:
    settings = load_settings(environ, None)
    memory = WorkerMemory(settings, f"ipc://{tmp_path}/w.sock")
    keeper = machine("qwen3", tiny=True).keeper
    memory.share_out(keeper, 100, ForwardMemory())
    assert keeper.store.budget.bytes_max == mb * MB
    memory.share_out(NullKVManager(list), 100, ForwardMemory())


# ---------------------------------------------------------------- how it is divided

BYTES = st.integers(0, 600 * GB)


@given(BYTES, BYTES, BYTES, BYTES, st.floats(0, 0.15))
@example(100 * GB, 20 * GB, 20 * GB, 10 * GB, 0.1)
def test_the_parts_fit_and_a_sequence_of_the_told_context_fits_beside_them(
    limit: int, model: int, slot: int, forward: int, overhead: float
) -> None:
    room = divide_room(limit, model, slot, forward, overhead)
    free = max(0, limit - model - working_bytes(limit)) / (1 + overhead)
    assert 0.499 * free - 2 <= room.kept_bytes <= 0.751 * free + 2
    assert 0 <= room.idle_bytes <= (free - room.kept_bytes) / 2 + 2
    need = slot + forward / (1 + overhead)
    if need <= free / 2:
        assert room.kept_bytes + need <= free + 2


@given(BYTES, BYTES, BYTES, st.integers(0, 20 * GB))
def test_a_larger_machine_keeps_no_less(limit: int, more: int, slot: int, model: int) -> None:
    small, large = (divide_room(size, model, slot, GB) for size in (limit, limit + more))
    assert small.kept_bytes <= large.kept_bytes + 4 and small.idle_bytes <= large.idle_bytes + 4


@pytest.mark.parametrize(
    ("environ", "is_batched", "most"),
    [
        ({}, True, (32, 32)),
        ({}, False, (4, 32)),
        ({"MAX_CONCURRENT_REQUESTS": "2"}, True, (2, 32)),
        ({"MAX_CONCURRENT_REQUESTS": "64"}, True, (64, 64)),
        ({"MAX_CONCURRENT_REQUESTS": "8"}, False, (8, 32)),
        ({"LIVE_SLOTS_MAX": "4"}, True, (4, 4)),
        ({"LIVE_SLOTS_MAX": "8", "MAX_CONCURRENT_REQUESTS": "32"}, True, (8, 8)),
        ({"LIVE_SLOTS_MAX": "64"}, True, (32, 64)),
    ],
)
def test_no_more_compute_than_may_be_held(
    environ: dict[str, str], is_batched: bool, most: tuple[int, int]
) -> None:
    settings = load_settings(environ, None)
    assert (running_max(settings, is_batched), live_slots_max(settings)) == most
