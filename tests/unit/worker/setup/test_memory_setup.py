"""The context that fits beside the weights, and what a start says where it is short."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import load_settings
from hearth.worker.engine.forward_memory import ForwardMemory
from hearth.worker.engine.mlx_memory import working_bytes
from hearth.worker.setup.memory_setup import WorkerMemory, fitting_tokens
from scripts.harness.socketless_worker import loaded

MB = 1 << 20


@given(
    st.integers(1, 300_000),
    st.integers(-5_000, 10**9),
    st.integers(1, 50_000),
    st.builds(ForwardMemory, st.just(512), st.integers(0, 10**5), st.integers(0, 64)),
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
