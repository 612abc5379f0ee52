"""Makes tiny checkpoints of text models that mlx-vlm alone loads."""

import copy
import shutil
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from scripts.fixtures import checkpoint_files
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.fixtures.make_fixture import CORE, DENSE, EXPERTS, LATENT, TEXT

Config = dict[str, Any]

LAYERS: Final = 2
_CORE: Final[Config] = dict(DENSE, num_hidden_layers=LAYERS)
_BOTH: Final = ["sliding_attention", "full_attention"]
_LATENT: Final[Config] = dict(LATENT, num_hidden_layers=LAYERS, tie_word_embeddings=False)
_QWEN: Final[Config] = dict(TEXT["qwen3_5"], num_hidden_layers=LAYERS)

# Types whose caches are rows, windows and states, so that what is kept is put back.
KEPT: Final[dict[str, Config]] = {
    "cohere2_moe": dict(
        CORE,
        **EXPERTS,
        num_hidden_layers=LAYERS,
        sliding_window=32,
        sliding_window_pattern=2,
        moe_num_shared_experts=1,
        logit_scale=1.0,
    ),
    "flint": dict(
        _CORE,
        **EXPERTS,
        layer_types=_BOTH,
        sliding_window=33,
        shared_expert_intermediate_size=64,
    ),
    "hrm_text": dict(_CORE, H_cycles=1, L_cycles=1, prefix_lm=False),
    "k2_horizon": dict(_CORE),
    "kolibri1": dict(
        _CORE,
        **EXPERTS,
        layer_types=_BOTH,
        sliding_window=32,
        shared_expert_intermediate_size=64,
    ),
    "limite": dict(
        CORE,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_gate_channels=16,
        ve_dim=64,
        sliding_window=32,
        global_layers=[1],
        mudd=False,
        xsa=False,
        softcap_logits={"kind": "sigmoid", "a": 30.0, "b": 0.0, "c": 5.0},
    ),
    "longcat_flash_sparse": dict(
        attention_method="MLA",
        hidden_size=128,
        ffn_hidden_size=128,
        expert_ffn_hidden_size=64,
        moe_topk=2,
        n_routed_experts=8,
        num_layers=LAYERS,
        vocab_size=checkpoint_files.VOCAB_SIZE,
        max_position_embeddings=131_072,
        num_attention_heads=2,
        kv_lora_rank=64,
        q_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
    ),
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": dict(_QWEN, **EXPERTS, shared_expert_intermediate_size=64),
    "xing4_0": dict(_LATENT, scoring_func="sigmoid", topk_method="noaux_tc"),
}
# Types with caches of a kind of their own.
OTHER: Final[dict[str, Config]] = {
    "deepseek_v4": dict(
        hidden_size=128,
        num_hidden_layers=4,
        compress_ratios=[0, 4, 128, 0],
        vocab_size=checkpoint_files.VOCAB_SIZE,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=2,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        num_hash_layers=1,
        index_n_heads=4,
        index_head_dim=64,
        index_topk=16,
        sliding_window=32,
        max_position_embeddings=131_072,
    ),
    "deepseek_v41": dict(  # with an engram, which mlx-lm refuses
        hidden_size=128,
        num_hidden_layers=4,
        compress_ratios=[0, 2, 1, 1],
        kv_source_layer_ids=[1, 2, 3],
        index_source_layer_ids=[1, 2, 3],
        candidate_source_layer_id=2,
        vocab_size=checkpoint_files.VOCAB_SIZE,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=32,
        q_lora_rank=64,
        o_lora_rank=32,
        o_groups=2,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        index_n_heads=4,
        index_head_dim=64,
        index_topk=1024,
        sliding_window=32,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-6,
        engram_layer_ids=[1],
        engram_num_embeddings=[101 + 103 + 107 + 109],  # primes from engram_vocab_size on
        engram_vocab_size=100,
        engram_n_heads=2,
        engram_head_dim=32,
        engram_max_ngram_size=3,
        engram_compressed_vocab_size=checkpoint_files.VOCAB_SIZE,
        vision_num_layers=1,
        vision_hidden_size=64,
        vision_num_heads=2,
        vision_intermediate_size=64,
    ),
    "hy_v4": dict(
        _LATENT,
        indexer_types=["full", "shared"],
        index_head_dim=64,
        index_n_heads=4,
        index_topk=1024,
    ),
    "minimax_m3": dict(
        _CORE,
        num_local_experts=8,
        num_experts_per_tok=2,
        dense_intermediate_size=128,
        shared_intermediate_size=64,
        rotary_dim=32,
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=32,
        index_block_size=16,
        index_topk_blocks=4,
        index_local_blocks=1,
    ),
    "z1t": dict(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        vocab_size=checkpoint_files.VOCAB_SIZE,
        max_position_embeddings=4096,
        linear_fan_in=16,
    ),
}


def make_text_checkpoint(
    directory: Path, name: str, config: Config, dtype: mx.Dtype = mx.float32
) -> Path:
    """Write a checkpoint of type `name` with random weights, and the fixtures' tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in fixture_dir("qwen3").glob("*token*"):
        shutil.copy(file, directory)
    shutil.copy(fixture_dir("qwen3") / "chat_template.jinja", directory)
    config = {"model_type": name, "eos_token_id": [3053, 3055], **config}
    model = checkpoint_files.vision_model(copy.deepcopy(config))
    model.set_dtype(dtype)
    checkpoint_files.save_weights(directory, model.parameters())
    checkpoint_files.write_json(directory / "config.json", config)
    if "engram_layer_ids" in config:  # each token's number in the engrams
        numbers = [*range(checkpoint_files.VOCAB_SIZE)]
        checkpoint_files.write_json(directory / "engram_token_map.json", numbers)
    return directory
