"""Holds published models: the numbers of their config.json, and what follows from them.

Upstream's own class of each architecture is made with these numbers, without weights: MLX computes
nothing before it is asked for a value, so a model of 770 billion parameters takes milliseconds and
no memory. Its shapes tell how many parameters there are; what it does with a few tokens tells the
caches of its layers, their shapes and their types.

The numbers are those of the repositories' config.json (`text_config` where there is one), and give
the published counts of parameters. Falcon-H1's `mamba_d_ssm` is heads times their size, and its
`mamba_n_groups` is assumed: a group more or less changes its state by half a per cent. Bits of
the weights are those of the usual conversions for MLX: 4 bits and a scale and a bias of 16 bits for
each group of 64; gpt-oss as published, MXFP4 for its experts and 8 bits for the rest.

Tables that are read by row (n-gram embeddings) are not resident: in a model that is made here a
single row stands in for each, and neither its weights nor what a step reads count them.
"""

import copy
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from hearth.shared.wire_messages import ModelFacts
from hearth.worker.engine.decode.batch_split import ReadCost, read_cost
from hearth.worker.engine.model_loader import LoadedModel, cache_layout
from hearth.worker.engine.weights_identity import WeightsIdentity
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.memory_verdict import unloaded_probe

AFFINE_4_BITS: Final = 4.5
AFFINE_5_BITS: Final = 5.0  # 4 bits, and scale and bias of groups of 32, or of 32 bits each
AFFINE_8_BITS: Final = 8.5
MXFP4_BITS: Final = 4.25
SHARES: Final = (8 / 9, 1 / 18, 1 / 18)  # of a quantised tensor: what its three arrays take
TABLES: Final = (".ngram_embedding.", ".engram.embed.")  # in the names of tables read by row

_QWEN3_5: Final = {
    "vocab_size": 248_320,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
}
_QWEN3: Final = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
}
_GPT_OSS: Final = {
    "model_type": "gpt_oss",
    "hidden_size": 2_880,
    "intermediate_size": 2_880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201_088,
    "max_position_embeddings": 131_072,
}


@dataclass(frozen=True, eq=False)
class ModelLayout:
    """One published model. Immutable; what is derived is computed once."""

    name: str
    repository: str  # whose config.json the numbers are
    config: Mapping[str, Any]
    bits: float = AFFINE_4_BITS  # of a weight
    expert_bits: float = AFFINE_4_BITS
    table_bits: float = AFFINE_4_BITS
    is_vlm: bool = False  # mlx-vlm has the architecture, not mlx-lm

    @property
    def text_config(self) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], self.config.get("text_config", self.config))

    @property
    def context_tokens(self) -> int:
        return int(self.text_config["max_position_embeddings"])

    # ------------------------------------------------------------ upstream's own class

    @cached_property
    def _made(self) -> tuple[Any, int]:
        """Upstream's language model in bfloat16, and the count of its tables' parameters."""
        kind, config = self.config["model_type"], copy.deepcopy(dict(self.config))
        if self.is_vlm:
            module = importlib.import_module(f"mlx_vlm.models.{kind}")
            model = module.Model(module.ModelConfig.from_dict(config)).language_model
        else:
            module = importlib.import_module(f"mlx_lm.models.{kind}")
            model = module.Model(module.ModelArgs.from_dict(config))
        model.eval()  # as loaded: some of mlx-vlm's forwards differ in training
        model.set_dtype(mx.bfloat16)
        tables = [
            (name, array)
            for name, array in tree_flatten(model.parameters())
            if any(table in name for table in TABLES)
        ]
        model.update(tree_unflatten([(name, array[:1]) for name, array in tables]))
        return model, sum(array.size for _, array in tables)

    @property
    def model(self) -> Any:
        """Upstream's model, with one row of each table. Nothing of it is ever computed."""
        return self._made[0]

    @property
    def table_count(self) -> int:
        """Parameters in tables that are read by row."""
        return self._made[1]

    def probe(self) -> list[Any]:
        """Return caches that have seen some tokens, without their values.

        mlx-vlm asks for values ahead of time in some forwards: here nobody answers.
        """
        with mock.patch.object(mx, "async_eval"):
            return unloaded_probe(self.model)

    @cached_property
    def layers(self) -> LayerMap:
        """What the project finds in these caches: bytes and arrays of rows, windows and states."""
        return LayerMap(self.probe())

    def slot_bytes(self, tokens: int) -> int:
        """Return what a live cache of so many tokens takes."""
        return self.layers.slot_bytes(tokens, None)

    def loaded(self, context_tokens: int = 0) -> LoadedModel:
        """Return it as a model that was loaded on a Mac; `context_tokens` 0 = all of its own."""
        facts = ModelFacts(
            name=self.name,
            path=self.name,
            architecture=str(self.text_config["model_type"]),
            context_tokens=min(self.context_tokens, context_tokens or self.context_tokens),
            vocab_size=self.text_config["vocab_size"],
            parameter_count=self.parameter_count,
            weight_bytes=self.weight_bytes,
            cache_layout=cache_layout(self.probe()),
            backend="metal",
        )
        return LoadedModel(
            *(self.model, None, {}, dict(self.config), Path()),
            *(WeightsIdentity(Path(), is_hashed=False), facts),
        )

    # ------------------------------------------------------------ weights

    @cached_property
    def _parameters(self) -> list[tuple[str, int]]:
        """The names and sizes of the checkpoint's tensors."""
        is_tied = self.text_config.get("tie_word_embeddings", False)
        return [
            (name, array.size)
            for name, array in tree_flatten(self.model.parameters())
            if not (is_tied and "lm_head" in name)
        ]

    def weights(self) -> Iterator[int]:
        """Yield the bytes of the weights' arrays as they are loaded."""
        for name, size in self._parameters:
            bits = self.expert_bits if "switch_mlp" in name or ".experts." in name else self.bits
            yield from (max(1, int(size * bits // 8 * share)) for share in SHARES)

    @cached_property
    def resident_count(self) -> int:
        return sum(size for _, size in self._parameters)

    @property
    def parameter_count(self) -> int:
        return self.resident_count + self.table_count

    @property
    def table_bytes(self) -> int:
        """Bytes of the checkpoint that are read by row, and not resident."""
        return int(self.table_count * self.table_bits) // 8

    @property
    def is_hybrid(self) -> bool:
        return self.layers.layout.has_state

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights in memory: all but the tables."""
        experts = int(self._cost.expert_bytes) // 2
        return int((self.resident_count - experts) * self.bits + experts * self.expert_bits) // 8

    @cached_property
    def _cost(self) -> ReadCost:
        """What a decode step reads of the weights, if they have 16 bits."""
        return read_cost(self.model, self.config, 0, 0, 0)

    @cached_property
    def _weight_cost(self) -> ReadCost:
        """What a decode step reads of the weights."""
        return replace(
            self._cost,
            weight_bytes=self._cost.weight_bytes * self.bits / 16,
            expert_bytes=self._cost.expert_bytes * self.expert_bits / 16,
        )

    @cached_property
    def read_cost(self) -> ReadCost:
        """What a decode step of several sequences reads."""
        layers = self.layers
        return replace(
            self._weight_cost,
            row_bytes=layers.row_bytes,
            window=layers.layout.window,
            window_row_bytes=layers.window_bytes(1),
        )

    @cached_property
    def active_count(self) -> int:
        """Parameters that one token goes through; of untied embeddings it reads one row."""
        return int(self._cost.weights(1)) // 2

    @cached_property
    def active_bytes(self) -> int:
        """Bytes of weights that a decode step of one sequence reads."""
        return int(self._weight_cost.weights(1))


def _qwen3_5(name: str, is_moe: bool = False, **text: int) -> ModelLayout:
    kind = "qwen3_5_moe" if is_moe else "qwen3_5"
    return ModelLayout(
        name,
        f"Qwen/{name}",
        {"model_type": kind, "text_config": {"model_type": f"{kind}_text", **_QWEN3_5, **text}},
    )


def _gpt_oss(name: str, **more: int) -> ModelLayout:
    return ModelLayout(name, f"openai/{name}", _GPT_OSS | more, AFFINE_8_BITS, MXFP4_BITS)


LAYOUTS: Final = (
    ModelLayout(
        "Qwen3-4B",
        "Qwen/Qwen3-4B-Instruct-2507",
        _QWEN3
        | {
            "hidden_size": 2_560,
            "intermediate_size": 9_728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "max_position_embeddings": 262_144,
            "rope_theta": 5_000_000,
            "tie_word_embeddings": True,
        },
    ),
    _qwen3_5(
        "Qwen3.5-9B",
        hidden_size=4_096,
        intermediate_size=12_288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_value_heads=32,
    ),
    _qwen3_5(
        "Qwen3.5-27B",
        hidden_size=5_120,
        intermediate_size=17_408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_value_heads=48,
    ),
    _qwen3_5(
        "Qwen3.5-35B-A3B",
        is_moe=True,
        hidden_size=2_048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_value_heads=32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    ModelLayout(
        "Qwen3-32B",
        "Qwen/Qwen3-32B",
        _QWEN3
        | {
            "hidden_size": 5_120,
            "intermediate_size": 25_600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "max_position_embeddings": 40_960,
            "rope_theta": 1_000_000,
            "tie_word_embeddings": False,
        },
    ),
    ModelLayout(
        "Llama-3.3-70B",
        "meta-llama/Llama-3.3-70B-Instruct",
        {
            "model_type": "llama",
            "hidden_size": 8_192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000,
            "tie_word_embeddings": False,
        },
    ),
    _gpt_oss("gpt-oss-20b", num_hidden_layers=24, num_local_experts=32),
    _gpt_oss("gpt-oss-120b", num_hidden_layers=36, num_local_experts=128),
    ModelLayout(
        "Gemma-3-27B",
        "google/gemma-3-27b-it",
        {
            "model_type": "gemma3_text",
            "hidden_size": 5_376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1_024,
            "sliding_window_pattern": 6,
            "vocab_size": 262_208,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,  # as where a config does not say
        },
    ),
    # Source: file 57550032974 of the searched index, which has all that is not mlx-lm's default.
    ModelLayout(
        "Gemma-4-26B-A4B",
        "google/gemma-4-26B-A4B-it",
        {
            "model_type": "gemma4_text",
            "hidden_size": 2_816,
            "intermediate_size": 2_112,
            "moe_intermediate_size": 704,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
            "sliding_window": 1_024,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
            "vocab_size": 262_144,
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": True,
        },
    ),
    ModelLayout(
        "GLM-4.5-Air",
        "zai-org/GLM-4.5-Air",
        {
            "model_type": "glm4_moe",
            "hidden_size": 4_096,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1_408,
            "num_hidden_layers": 46,
            "first_k_dense_replace": 1,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "vocab_size": 151_552,
            "max_position_embeddings": 131_072,
        },
    ),
    ModelLayout(
        "GLM-4.7-Flash",
        "zai-org/GLM-4.7-Flash",
        {
            "model_type": "glm4_moe_lite",
            "hidden_size": 2_048,
            "intermediate_size": 10_240,
            "moe_intermediate_size": 1_536,
            "num_hidden_layers": 47,
            "first_k_dense_replace": 1,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "vocab_size": 154_880,
            "max_position_embeddings": 202_752,
            "tie_word_embeddings": False,
        },
    ),
    ModelLayout(
        "Falcon-H1-34B",
        "tiiuae/Falcon-H1-34B-Instruct",
        {
            "model_type": "falcon_h1",
            "hidden_size": 5_120,
            "intermediate_size": 21_504,
            "num_hidden_layers": 72,
            "num_attention_heads": 20,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "mamba_d_conv": 4,
            "mamba_d_head": 128,
            "mamba_d_ssm": 4_096,
            "mamba_d_state": 256,
            "mamba_n_groups": 2,
            "mamba_n_heads": 32,
            "vocab_size": 261_120,
            "max_position_embeddings": 262_144,
            "tie_word_embeddings": False,
        },
    ),
    # Count: 125 B, 51 B beside them in a table, 4 B of MTP that no conversion loads; 6 B active.
    # Source: the config that two ports check at loading (files 67156632118 and 71512192201 of the
    # searched index of GitHub). Bits: mlx-community's conversion, 111.5 GB (file 65813010861).
    ModelLayout(
        "Qwen3.8-Flash-Next",
        "Qwen/Qwen3.8-Flash-Next",
        {
            "model_type": "qwen4_exp",
            "text_config": _QWEN3_5
            | {
                "model_type": "qwen4_exp_text",
                "eos_token_id": 248_044,
                "hidden_size": 2_560,
                "num_hidden_layers": 48,
                "num_attention_heads": 24,
                "num_key_value_heads": 2,
                "linear_num_value_heads": 48,
                "num_experts": 512,
                "num_experts_per_tok": 10,
                "moe_intermediate_size": 640,
                "shared_expert_intermediate_size": 640,
                "hc_count": 4,
                "hc_lowrank": 320,
                "ple_layer_ids": [2],
                "ple_embed_dim": 2_560,
                "ple_conv_kernel_size": 4,
                "ngram_size": 3,
                "heads_per_ngram": 8,
                "ngram_vocab_size_base": 20_000_000,
                "indexer_n_heads": 4,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 128,
                "indexer_budget": 2_048,
                "indexer_compress_ratio": 4,
            },
            "vision_config": {"model_type": "qwen4_exp", "deepstack_visual_indexes": []},
        },
        *(AFFINE_5_BITS, AFFINE_5_BITS, AFFINE_5_BITS),
        is_vlm=True,
    ),
    # Count: 552 B, 197 B in two tables, 6 B of drafter that no conversion loads. Source: the config
    # of revision dba1be0a as a port's tests quote it (file 68503033665). Bits: mlx-community's
    # conversion, whose rows of 256 take 160 bytes (file 70747831461).
    ModelLayout(
        "DeepSeek-V4.1-Flash",
        "deepseek-ai/DeepSeek-V4.1-Flash",
        {
            "model_type": "deepseek_v41",
            "vocab_size": 129_280,
            "hidden_size": 5_120,
            "moe_intermediate_size": 2_304,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 1_280,
            "o_lora_rank": 1_024,
            "o_groups": 8,
            "max_position_embeddings": 1_048_576,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "sliding_window": 128,
            "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20,
            "kv_source_layer_ids": [2, 8, 14, 20],
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 512,
            "hc_mult": 4,
            "engram_layer_ids": [1, 14],
            "engram_num_embeddings": [384_006_168, 384_016_682],
            "engram_max_ngram_size": 4,
            "engram_n_heads": 8,
            "engram_head_dim": 256,
            "tie_word_embeddings": False,
        },
        *(AFFINE_5_BITS, AFFINE_5_BITS, AFFINE_5_BITS),
        is_vlm=True,
    ),
    # Count: 320 B with 7 B of MTP that no conversion loads; 18 B active. Source: the config that
    # oMLX checks at loading (files 60714017979 and 66389596226): `index_kpool` is 4, mlx-vlm's
    # default of 16 is not the model's.
    ModelLayout(
        "GLM-5.3-Flash",
        "zai-org/GLM-5.3-Flash",
        {
            "model_type": "glm5_next",
            "text_config": {
                "model_type": "glm5_next_text",
                "vocab_size": 154_880,
                "hidden_size": 4_096,
                "intermediate_size": 12_288,
                "moe_intermediate_size": 2_048,
                "num_hidden_layers": 45,
                "first_k_dense_replace": 3,
                "num_attention_heads": 64,
                "num_key_value_heads": 64,
                "n_routed_experts": 288,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "q_lora_rank": 1_536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 256,
                "qk_rope_head_dim": 0,
                "v_head_dim": 256,
                "index_n_heads": 32,
                "index_head_dim": 128,
                "index_topk": 2_048,
                "index_kpool": 4,
                "linear_attn_config": {
                    "num_heads": 64,
                    "head_dim": 128,
                    "short_conv_kernel_size": 4,
                    "gate_lower_bound": -5.0,
                },
                "hc_mult": 4,
                "max_position_embeddings": 1_048_576,
                "tie_word_embeddings": False,
            },
        },
        is_vlm=True,
    ),
    # Count: 770 B, 49 B active. Source: the model's table in file 60243573531, which has the
    # layers, widths, ranks, indexers and the context, and mlx-vlm's defaults, which are the same.
    ModelLayout(
        "Hy4",
        "tencent/Hy4-preview",
        {
            "model_type": "hy_v4",
            "vocab_size": 120_832,
            "hidden_size": 6_144,
            "intermediate_size": 18_432,
            "moe_intermediate_size": 2_048,
            "num_hidden_layers": 78,
            "first_k_dense_replace": 1,
            "num_attention_heads": 64,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "q_lora_rank": 2_048,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk": 2_048,
            "hc_mult": 4,
            "max_position_embeddings": 1_048_576,
            "tie_word_embeddings": False,
        },
        is_vlm=True,
    ),
)


layout: Final = {each.name: each for each in LAYOUTS}.__getitem__  # by its name
