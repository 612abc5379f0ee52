"""Compares how long forwards are with what a model's layers and the chip are worth."""

import pytest

from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.engine.prefill_lengths import PrefillLengths, lengths_for, prefill_lengths
from scripts.fixtures.fixture_cache import TINY_NAMES
from scripts.harness.socketless_worker import loaded

M1, M4, M5 = "applegpu_g13s", "applegpu_g16p", "applegpu_g17d"


FUSED = {"hidden_size": 4096, "num_attention_heads": 32}  # heads of 128
WIDE = FUSED | {"head_dim": 256}  # whose scores are written, but for long forwards on M5
LATENT = FUSED | {"kv_lora_rank": 512}


@pytest.mark.parametrize(
    ("architecture", "config", "kind", "expected"),
    [
        (M4, FUSED, {}, (512, 64, 256, 65_536, 128)),
        (M4, FUSED, {"keeps_states": True}, (1024, 64, 256, 65_536, 128)),
        (M4, FUSED, {"has_experts": True}, (2048, 256, 512, 65_536, 256)),
        (M4, WIDE, {"has_experts": True, "keeps_states": True}, (2048, 256, 512, 16_384, 256)),
        (M4, LATENT, {"has_experts": True}, (2048, 256, 512, 16_384, 256)),
        (M4, WIDE, {"keeps_states": True}, (1024, 64, 256, 32_768, 128)),
        (M4, WIDE, {}, (512, 64, 256, 65_536, 128)),
        (M5, FUSED, {}, (512, 64, 256, 65_536, 128)),
        (M5, WIDE, {}, (1024, 64, 1024, 32_768, 128)),
        (M5, WIDE, {"has_experts": True}, (2048, 256, 1024, 16_384, 256)),
        ("applegpu_g18p", WIDE, {}, (1024, 64, 1024, 32_768, 128)),
        ("NVIDIA H100", WIDE, {}, (512, 64, 256, 65_536, 128)),
        ("applegpu_gx", WIDE, {}, (512, 64, 256, 65_536, 128)),
        ("", {}, {}, (512, 64, 256, 65_536, 128)),
    ],
)
def test_a_gpus_forwards_are_as_long_as_its_layers_are_worth(
    architecture: str, config: dict[str, int], kind: dict[str, bool], expected: tuple[int, ...]
) -> None:
    assert lengths_for(config, "metal", architecture, **kind) == PrefillLengths(*expected)


def test_a_cpus_forwards_are_short_whatever_the_model() -> None:
    for kind in ({}, {"has_experts": True}, {"keeps_states": True}):
        lengths = lengths_for(WIDE, "cpu", M5, **kind)
        assert (lengths.chunk, lengths.gap, lengths.step_min) == (256, 64, 256)


def test_no_kind_writes_more_scores_than_chunks_of_512_do() -> None:
    """But for the floors: 512 tokens on experts, 1,024 where a kernel on M5 takes them."""
    for kind in ({}, {"has_experts": True}, {"keeps_states": True}):
        lengths = lengths_for(WIDE, "metal", M4, **kind)
        grid = PrefillGrid(lengths.chunk, lengths.step_min, lengths.full_to)
        for depth in range(1_000, 300_000, 1_000):
            assert grid.step_at(depth) * depth <= 512 * max(65_536, depth)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [("qwen3", 512), ("qwen3_5", 1024), ("gpt_oss", 2048), ("glm4_moe_lite", 2048)],
)
def test_what_a_model_is_stands_in_its_layers(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.worker.engine.prefill_lengths.backend", lambda: "metal")
    monkeypatch.setattr("hearth.worker.engine.prefill_lengths.device_architecture", lambda: M1)
    lengths = prefill_lengths(loaded(name, tiny=name in TINY_NAMES))
    assert lengths.chunk == chunk
    assert (lengths.gap, lengths.beside_min) == ((256, 256) if chunk == 2048 else (64, 128))


def test_a_deep_prompt_on_an_m5_keeps_to_the_fused_kernel() -> None:
    """Of 1,024 queries and more it writes no scores: a shorter step would."""
    lengths = lengths_for(WIDE, "metal", M5)
    assert PrefillGrid(lengths.chunk, lengths.step_min, lengths.full_to).step_at(200_000) == 1024
    assert PrefillGrid(1024).step_at(200_000) == 256
