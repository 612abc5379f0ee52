"""Compares the estimate of a forward with the peak that MLX counts, on one fixture a kind."""

import mlx.core as mx
import numpy as np
import pytest

from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.forward_memory import ForwardMemory, forward_memory, forward_of
from hearth.worker.kv.layer_adapters import LayerMap
from scripts.harness.socketless_worker import loaded
from tests.helpers.models.by_day import by_day

CHUNK, DEPTH = 128, 1_536


@pytest.mark.parametrize(
    "name",
    by_day(
        ["qwen3", "qwen3_moe", "qwen3_5", "gpt_oss", "gemma3_text", "glm4_moe_lite", "falcon_h1"],
        ["qwen3", "qwen3_5", "glm4_moe_lite"],
    ),
)
def test_a_forward_takes_what_is_estimated(name: str) -> None:
    model = loaded(name)
    engine = Engine(model)
    forward = forward_of(model, PrefillGrid(CHUNK))
    cache = engine.new_cache()
    layers = LayerMap(engine.probe())
    layers.reserve(cache, DEPTH)
    ids = np.random.default_rng(0).integers(5, 200, DEPTH).tolist()
    for at in range(0, DEPTH - CHUNK, CHUNK):
        engine.prefill(cache, ids[at : at + CHUNK])
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    engine.prefill(cache, ids[-CHUNK:])
    peak = mx.get_peak_memory() - held
    assert peak <= forward.bytes_at(DEPTH) <= 2.5 * peak


def test_a_deeper_prompt_takes_more_and_a_short_one_less() -> None:
    forward = ForwardMemory(PrefillGrid(512), 1_000, 48, 10)
    depths = [0, 1, 511, 512, 513, 100_000]
    found = [forward.bytes_at(depth) for depth in depths]
    assert found == sorted(found) and found[0] == 0
    assert found[-1] == 512 * (1_000 + 65_536 * 48) + 655_360, "deeper chunks are shorter"
    deep = forward.bytes_at(300_000)
    assert deep == 256 * (1_000 + 300_000 * 48) + 3_000_000, "and no shorter than 256"


def test_what_metal_fuses_costs_nothing_and_a_head_of_256_does() -> None:
    config = {"hidden_size": 5_120, "num_attention_heads": 24, "head_dim": 256}
    wide = forward_memory(config, PrefillGrid(512), 2, "metal").bytes_at(100_000)
    assert 1.6e9 < wide < 2.6e9, "1.6 GB of scores at 65,536 tokens, and a mask"
    fused = forward_memory(config | {"head_dim": 128}, PrefillGrid(512), 2, "metal")
    assert fused.pair_bytes == 0 and fused.bytes_at(100_000) < 0.3e9
    assert forward_memory(config | {"head_dim": 128}, PrefillGrid(512), 2, "cpu").pair_bytes > 0


@pytest.mark.parametrize("config", [{}, {"hidden_size": "5120"}, {"num_attention_heads": True}])
def test_a_config_of_other_names_counts_as_nothing(config: dict[str, object]) -> None:
    assert forward_memory(config, PrefillGrid(512), 2, "metal").bytes_at(100_000) == 0
