"""Writes tiny checkpoints whose models read tables by row: PLE, engrams, n-gram embedders."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

from scripts.fixtures import checkpoint_files
from scripts.fixtures.fixture_cache import fixture_dir
from scripts.fixtures.vision_families import text_model

VOCAB: Final = checkpoint_files.VOCAB_SIZE
CONFIGS: Final[Mapping[str, dict[str, Any]]] = {
    "qwen4_exp": dict(
        image_token_id=VOCAB - 2,
        video_token_id=VOCAB - 1,
        vocab_size=VOCAB,
        eos_token_id=2,
        text_config=dict(
            model_type="qwen4_exp_text",
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            linear_num_value_heads=2,
            linear_num_key_heads=1,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            linear_conv_kernel_dim=4,
            full_attention_interval=2,
            num_experts=4,
            num_experts_per_tok=2,
            shared_expert_intermediate_size=32,
            moe_intermediate_size=32,
            rms_norm_eps=1e-6,
            vocab_size=VOCAB,
            max_position_embeddings=4096,
            hc_count=2,
            hc_lowrank=16,
            ple_layer_ids=[1, 3],
            ple_embed_dim=256,
            ngram_vocab_size_base=500,
            heads_per_ngram=2,
            split_ngram_parts=5,
            indexer_head_dim=32,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_budget=64,
            indexer_compress_ratio=4,
            eos_token_id=2,
            rope_parameters=dict(
                type="default",
                mrope_section=[2, 1, 1],
                rope_theta=1e6,
                partial_rotary_factor=0.25,
            ),
        ),
        vision_config=dict(
            depth=1,
            hidden_size=32,
            intermediate_size=32,
            out_hidden_size=64,
            num_heads=2,
            patch_size=16,
            spatial_merge_size=2,
            temporal_patch_size=2,
            in_channels=3,
            num_position_embeddings=16,
            deepstack_visual_indexes=[],
        ),
    ),
    "deepseek_v41": dict(
        vocab_size=VOCAB,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        compress_ratios=[0, 2, 1, 1],
        kv_source_layer_ids=[1, 2],
        index_source_layer_ids=[1, 2],
        index_n_heads=2,
        index_head_dim=32,
        index_topk=8,
        candidate_source_layer_id=2,
        candidate_topk_blocks=4,
        candidate_block_size=2,
        hc_mult=2,
        engram_layer_ids=[1, 3],
        engram_num_embeddings=[3000, 3000],
        engram_max_ngram_size=3,
        engram_vocab_size=600,
        engram_n_heads=2,
        engram_head_dim=64,
        engram_compressed_vocab_size=64,
        image_token_id=VOCAB - 1,
        vision_config=dict(num_layers=1, hidden_size=32, num_heads=2, intermediate_size=32),
        max_position_embeddings=4096,
    ),
    "longcat_flash_ngram": dict(
        hidden_size=192,
        ffn_hidden_size=64,
        moe_topk=2,
        expert_ffn_hidden_size=32,
        n_routed_experts=4,
        zero_expert_num=1,
        num_layers=2,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
        num_attention_heads=2,
        kv_lora_rank=64,
        q_lora_rank=64,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        routed_scaling_factor=1.0,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        mla_scale_q_lora=True,
        mla_scale_kv_lora=True,
        ngram_vocab_size_ratio=1,
        emb_neighbor_num=2,
        emb_split_num=3,
        eos_token_id=2,
    ),
}


def is_table(name: str) -> bool:
    return any(part in name for part in ("ngram_embedding.", "engram.embed", ".embedders."))


def write_checkpoint(
    directory: Path,
    kind: str,
    dtype: mx.Dtype = mx.bfloat16,
    bits: int = 0,
    mode: str = "affine",
    **text: Any,
) -> Path:
    """Write a checkpoint of `kind` with random weights, in float32 but for its tables.

    These are of `dtype`, or packed into `bits`. `text` replaces values of its text configuration.
    """
    config = json.loads(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    config.get("text_config", config).update(text)
    is_text = kind == "longcat_flash_ngram"
    model: Any = text_model(config) if is_text else checkpoint_files.vision_model(config)
    model.update(tree_map_with_path(partial(cast_table, dtype), model.parameters()))
    if bits:
        config["quantization"] = {"group_size": 32, "bits": bits, "mode": mode}
        nn.quantize(model, 32, bits, mode=mode, class_predicate=lambda name, _: is_table(name))
    checkpoint_files.save_weights(directory, model.parameters())
    checkpoint_files.write_json(directory / "config.json", config)
    checkpoint_files.write_json(directory / "engram_token_map.json", [n % 64 for n in range(VOCAB)])
    source = fixture_dir("qwen3" if is_text else "qwen3_5_vl", tiny=True)
    processors = () if is_text else ("preprocessor_config.json", "processor_config.json")
    for name in ("tokenizer.json", "tokenizer_config.json", *processors):
        (directory / name).write_bytes((source / name).read_bytes())
    return directory


def cast_table(dtype: mx.Dtype, name: str, array: mx.array) -> mx.array:
    return array.astype(dtype) if is_table(name) else array
