"""Holds a tiny configuration of each model family whose code in mlx-lm divides itself over ranks.

Two or three layers, one of each kind that the family has; heads, rows, experts' rows and the
vocabulary divide by 2 and by 3. The names are mlx-lm's files that define `shard`.
"""

from typing import Any, Final

from scripts.fixtures.make_fixture import DENSE, LATENT
from scripts.fixtures.rank_fixtures import CORE, RANKED

Config = dict[str, Any]

VOCAB_SIZE: Final = 768

_CORE: Final[Config] = DENSE | CORE | {"vocab_size": VOCAB_SIZE}
_EXPERTS: Final[Config] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=96)
_ROUTED: Final[Config] = dict(
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
    routed_scaling_factor=1.0,
    norm_topk_prob=True,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    moe_layer_freq=1,
)
_LATENT: Final[Config] = (
    LATENT
    | _ROUTED
    | dict(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=384,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
    )
)
_INDEXED: Final[Config] = _LATENT | dict(
    index_head_dim=64, index_n_heads=6, index_topk=128, topk_method="noaux_tc"
)
_LONGCAT: Final[Config] = dict(
    attention_method="MLA",
    zero_expert_type="identity",
    hidden_size=128,
    ffn_hidden_size=384,
    moe_topk=2,
    expert_ffn_hidden_size=96,
    n_routed_experts=4,
    zero_expert_num=1,
    num_layers=2,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=131_072,
    num_attention_heads=6,
    kv_lora_rank=64,
    q_lora_rank=96,
    qk_rope_head_dim=32,
    qk_nope_head_dim=32,
    v_head_dim=32,
    routed_scaling_factor=1.0,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    mla_scale_q_lora=True,
    mla_scale_kv_lora=True,
    attention_bias=False,
)
_SLIDING: Final[Config] = dict(
    layer_types=["sliding_attention", "full_attention"], sliding_window=64
)
_YARN: Final[Config] = dict(
    rope_theta=1e6,
    type="yarn",
    rope_type="yarn",
    factor=4.0,
    original_max_position_embeddings=4096,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)

FAMILIES: Final[dict[str, Config]] = {
    "deepseek_v2": _LATENT | {"topk_method": "greedy", "rope_scaling": _YARN},
    "deepseek_v3": dict(_LATENT),
    "deepseek_v32": dict(_INDEXED),
    "deepseek_v41": dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=12,
        head_dim=64,
        q_lora_rank=96,
        qk_rope_head_dim=32,
        o_groups=6,
        o_lora_rank=32,
        moe_intermediate_size=96,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        compress_ratios=[0, 4, 4],
        kv_source_layer_ids=[1],
        index_source_layer_ids=[1],
        index_n_heads=6,
        index_head_dim=64,
        index_topk=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-6,
        hc_mult=2,
        hc_sinkhorn_iters=4,
    ),
    "exaone_moe": _CORE
    | _EXPERTS
    | _SLIDING
    | dict(num_shared_experts=1, is_moe_layer=[False, True], routed_scaling_factor=1.0),
    "glm4_moe": _CORE
    | _ROUTED
    | dict(rope_scaling=None, use_qk_norm=True, attention_bias=False, partial_rotary_factor=0.5),
    "glm4_moe_lite": dict(_LATENT),
    "gpt_oss": RANKED["gpt_oss"] | {"vocab_size": VOCAB_SIZE, "sliding_window": 64},
    "iquestloopcoder": dict(_CORE),
    "kimi_k25": dict(text_config=_LATENT | {"model_type": "deepseek_v3"}),
    "kimi_k3": dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=6,
        intermediate_size=384,
        max_position_embeddings=131_072,
        activation_situ_beta=1.0,
        activation_situ_linear_beta=1.0,
        attn_res_block_size=2,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=96,
        first_k_dense_replace=1,
        linear_attn_config=dict(
            kda_layers=[1, 3],
            full_attn_layers=[2],
            num_heads=6,
            head_dim=32,
            short_conv_kernel_size=4,
            gate_lower_bound=-5.0,
        ),
    ),
    "llama": dict(_CORE, rms_norm_eps=1e-5),
    "longcat_flash": dict(_LONGCAT),
    "longcat_flash_ngram": _LONGCAT | {"ngram_vocab_size_ratio": 4},
    "minimax": _CORE
    | dict(
        num_experts_per_tok=2,
        num_local_experts=4,
        shared_intermediate_size=0,
        intermediate_size=96,
        rotary_dim=16,
    ),
    "minimax_m3_vl": dict(
        text_config=_CORE
        | dict(
            model_type="minimax_m3",
            intermediate_size=96,
            dense_intermediate_size=384,
            shared_intermediate_size=96,
            num_local_experts=4,
            num_experts_per_tok=2,
            rotary_dim=16,
            moe_layer_freq=[0, 1],
            index_n_heads=6,
            index_head_dim=32,
            index_block_size=32,
            index_topk_blocks=2,
            layer_types=["full_attention", "sparse_attention"],
        )
    ),
    "ministral3": _CORE | _SLIDING | {"rope_parameters": _YARN},
    "mistral4": _LATENT | {"rope_parameters": _YARN, "head_dim": None},
    "muse_spark": dict(
        text_config=_CORE
        | _SLIDING
        | dict(
            post_norm_eps=1e-6,
            rope_parameters={"rope_theta": 1e6},
            layer_rope_theta=[1e6, 0.0],
            final_logit_softcapping=30.0,
            output_multiplier=1.0,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_hidden_size=96,
            moe_intermediate_size=96,
        )
    ),
    "qwen2": dict(_CORE, head_dim=None),
    "qwen3": dict(_CORE),
    "qwen3_5": RANKED["qwen3_5"] | {"vocab_size": VOCAB_SIZE},
    "qwen3_moe": _CORE
    | _EXPERTS
    | dict(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True),
    "step3p5": dict(
        hidden_size=128,
        num_hidden_layers=3,
        vocab_size=VOCAB_SIZE,
        num_attention_heads=12,
        num_attention_groups=6,
        head_dim=32,
        intermediate_size=384,
        sliding_window=64,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        attention_other_setting=dict(num_attention_heads=12, num_attention_groups=6),
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=96,
        share_expert_dim=96,
        moe_layers_enum="1,2",
    ),
}
