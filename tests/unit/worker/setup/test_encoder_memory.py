"""A worker leaves room for EMBEDDING_MODEL and RERANK_MODEL, by what their files say they take."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.shared.errors import StartError
from hearth.shared.settings import Settings, load_settings
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.mlx_memory import GB, MB, memory_limit
from hearth.worker.memory_verdict import memory_verdict
from hearth.worker.setup import memory_setup
from hearth.worker.setup.memory_setup import (
    WorkerMemory,
    encoders_bytes,
    forward_bytes,
    process_bytes,
    workers_limit,
)
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.mac.real_encoder_sizes import EMBEDDER, RANKER


def settings_of(**environ: str) -> Settings:
    return load_settings({"MEMORY_LIMIT_MB": "20480", **environ}, None)


@pytest.fixture
def both(tmp_path: Path) -> Settings:
    embedder, ranker = str(EMBEDDER.written(tmp_path)), str(RANKER.written(tmp_path))
    return settings_of(EMBEDDING_MODEL=embedder, RERANK_MODEL=ranker)


def test_nothing_is_left_free_where_neither_model_is_set() -> None:
    assert encoders_bytes(settings_of()) == 0
    assert workers_limit(settings_of()) == memory_limit(settings_of()) == 20 * GB


def test_one_process_has_the_weights_of_both_and_the_forward_of_the_greedier(
    both: Settings, tmp_path: Path
) -> None:
    alone = encoders_bytes(settings_of(EMBEDDING_MODEL=both.embedding_model))
    weights = EMBEDDER.weight_bytes
    assert alone == process_bytes([Path(both.embedding_model)], weights)
    assert alone > weights + forward_bytes(dict(EMBEDDER.config)) > weights
    assert encoders_bytes(both) == alone + RANKER.weight_bytes
    assert workers_limit(both) == 20 * GB - encoders_bytes(both)


def test_a_model_that_is_not_here_yet_counts_without_its_weights() -> None:
    absent = settings_of(EMBEDDING_MODEL="nobody/has-this-model")
    assert 0 < encoders_bytes(absent) < GB
    assert encoders_bytes(settings_of(EMBEDDING_MODEL="/no/such/place")) == encoders_bytes(absent)


def test_all_workers_share_what_is_left_and_say_so(
    both: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_memory, "set_memory_limit", lambda _limit: None)
    memory = WorkerMemory(both, f"ipc://{tmp_path}/worker-0.sock")
    assert memory.share.total == 20 * GB - encoders_bytes(both)
    assert memory.report()["encoders_bytes"] == encoders_bytes(both)
    with pytest.raises(StartError, match=r"beside the .* GB of EMBEDDING_MODEL and RERANK_MODEL"):
        memory.admit(20 * GB)


def test_the_verdict_on_a_model_of_text_leaves_it_free_too(both: Settings) -> None:
    directory = fixture_dir("qwen3", tiny=True)
    alone = memory_verdict(directory, settings_of(), 10 * MB)
    beside = memory_verdict(directory, both, 10 * MB)
    assert beside.limit == alone.limit - encoders_bytes(both)
    assert (alone.encoders_bytes, beside.encoders_bytes) == (0, encoders_bytes(both))


@given(
    hidden=st.integers(1, 8_192),
    inner=st.integers(0, 65_536),
    heads=st.integers(0, 128),
    positions=st.one_of(st.none(), st.integers(1, 10**7), st.just("many")),
)
def test_a_larger_model_never_counts_less(
    hidden: int, inner: int, heads: int, positions: Any
) -> None:
    config = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    told = forward_bytes(config | {"max_position_embeddings": positions})
    wider = config | {"intermediate_size": inner + 1, "max_position_embeddings": positions}
    assert 0 < told <= forward_bytes(wider)


def test_fused_attention_takes_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = forward_bytes(dict(EMBEDDER.config))
    monkeypatch.setattr(memory_setup, "backend", lambda: "metal")
    assert forward_bytes(dict(EMBEDDER.config)) < on_cpu / 2
