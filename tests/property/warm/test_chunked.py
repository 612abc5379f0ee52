"""Llama 4, whose chunked layers drop their front: a tiny model made here, warm against cold."""

import dataclasses
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.models import llama4

from scripts.harness.socketless_worker import Machine, loaded, marks, vocabulary
from tests.helpers.worker.cold_difference import difference

CHUNK_SIZE = 100  # tokens that its chunked layers keep


@cache
def tiny() -> Any:
    """Return the qwen3 fixture with its model replaced by a Llama 4 of four layers."""
    text = {
        **{"attention_bias": False, "attention_chunk_size": CHUNK_SIZE, "head_dim": 32},
        **{"hidden_act": "silu", "hidden_size": 64, "interleave_moe_layer_step": 1},
        **{"intermediate_size": 64, "intermediate_size_mlp": 64, "max_position_embeddings": 4096},
        **{"model_type": "llama4_text", "num_attention_heads": 2, "num_experts_per_tok": 1},
        **{"num_hidden_layers": 4, "num_key_value_heads": 1, "num_local_experts": 2},
        **{"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0},
        **{"use_qk_norm": True, "vocab_size": 3072},
    }
    arguments = llama4.ModelArgs.from_dict({"model_type": "llama4", "text_config": text})
    mx.random.seed(3)
    model = llama4.Model(arguments)
    model.update(tree_map(lambda w: mx.random.normal(w.shape) * 0.3, model.parameters()))
    mx.eval(model.parameters())
    return dataclasses.replace(loaded("qwen3"), model=model)


def machine_of(**rules: Any) -> Machine:
    return Machine(tiny(), marks("qwen3"), vocabulary("qwen3"), **rules)


@pytest.mark.parametrize("slots", [1, 4])
def test_a_chunked_model_goes_on_as_a_cold_one_would(slots: int) -> None:
    """Each turn of 60 tokens, three of them: the chunked layers drop their front."""
    warm = machine_of(is_exact=True, slots_max=slots)
    cold = machine_of(is_exact=True, keeps=False)
    assert warm.layers.layout.window == CHUNK_SIZE
    assert difference(warm, cold, "qwen3") == 0
    assert warm.keeper.counts["match_prefix"] >= 2


def test_branches_of_a_chunked_model_are_restored_from_what_is_kept() -> None:
    warm, cold = machine_of(is_exact=True, slots_max=1), machine_of(is_exact=True, keeps=False)
    trunk = list(range(300, 600))
    for branch in (list(range(700, 750)), list(range(800, 850))):
        for ids in (trunk + branch, trunk + [9] * 70, trunk + branch):
            mine, theirs = warm.ask(ids), cold.ask(ids)
            assert mine.tokens == theirs.tokens
            assert (mine.logits[0] == theirs.logits[0]).all()
    assert mine.cached >= 256
