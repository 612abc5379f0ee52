"""A worker leaves room for EMBEDDING_MODEL and RERANK_MODEL, by what their files say they take."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings, load_settings
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.mlx_memory import GB, MB, memory_limit
from hearth.worker.setup import encoder_memory
from hearth.worker.setup.encoder_memory import (
    encoders_bytes,
    forward_bytes,
    process_bytes,
    workers_limit,
)
from hearth.worker.setup.memory_setup import WorkerMemory
from hearth.worker.verdict.memory_verdict import memory_verdict
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.harness.layouts.imagined_worker import ImaginedWorker
from scripts.harness.layouts.model_layouts import layout
from scripts.harness.mac.mac_hardware import Mac
from scripts.harness.mac.real_encoder_sizes import EMBEDDER, LARGE_EMBEDDER, RANKER, RealEncoder


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
    monkeypatch.setattr(mlx_memory, "hold_memory", lambda _limit: None)
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


def test_texts_of_few_tokens_make_few_pairs_in_a_batch() -> None:
    config = {"hidden_size": 384, "intermediate_size": 1_536, "num_attention_heads": 12}
    short, long = (forward_bytes(config | {"max_position_embeddings": n}) for n in (512, 2_048))
    pair_bytes = 12 * 4 * 1.25 + 2 * 4  # scores and their mask on a CPU, and two masks of tokens
    assert long - short == (8_192 * 2_048 - 8_192 * 512) * pair_bytes


def test_matrices_of_16_bits_count_as_they_are_multiplied_and_quantised_ones_do_not() -> None:
    kept = dict(EMBEDDER.config)
    copies = forward_bytes(kept | {"quantization": None}) - forward_bytes(kept)
    assert copies == 5 * 1_024 * 3_072 * 4


def test_fused_attention_takes_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = forward_bytes(dict(EMBEDDER.config))
    monkeypatch.setattr(encoder_memory, "backend", lambda: "metal")
    assert forward_bytes(dict(EMBEDDER.config)) < on_cpu / 2


def test_a_large_model_on_a_mac_of_64_has_less_context_beside_each_encoder(tmp_path: Path) -> None:
    large = layout("Llama-3.3-70B")

    def told(**encoders: RealEncoder) -> int:
        settings = {name: str(one.written(tmp_path)) for name, one in encoders.items()}
        worker = ImaginedWorker(Mac("M4 Max", 64), large, Path("worker-0.sock"), **settings)
        worker.start()
        return worker.context()

    beside = told(EMBEDDING_MODEL=EMBEDDER)
    both = told(EMBEDDING_MODEL=EMBEDDER, RERANK_MODEL=RANKER)
    assert told() > beside > both > told(EMBEDDING_MODEL=LARGE_EMBEDDER)


def test_an_imagined_model_takes_no_disk(tmp_path: Path) -> None:
    directory = EMBEDDER.written(tmp_path)
    assert json.loads((directory / "config.json").read_text())["head_dim"] == 128
    file = directory / "model.safetensors"
    assert file.stat().st_size == EMBEDDER.weight_bytes
    assert file.stat().st_blocks * 512 < MB
