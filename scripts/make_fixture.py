#!/usr/bin/env python
"""Makes tiny random checkpoints of real architectures, for mlx_lm.load and mlx_vlm.load.

    scripts/make_fixture.py --out DIR [--only qwen3,llama] [--dtype float32] [--quant 4] [--tiny]

The same seeds and sizes each time. A fixture that is there already is made anew. On a CPU the
mixtures of experts run in float32 or with --quant only (MLX's GatherMM).
"""

import argparse
import copy
import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import checkpoints

Config = dict[str, Any]

GEMMA_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<bos>", "<pad>")
DTYPE_LABELS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

# Reasoning stays in every turn here and enable_thinking opens the block, so that tests have a
# second manner beside pocket's. @@IMAGE@@ becomes the family's image marker.
TEMPLATE = r"""{%- if tools %}<|im_start|>system
{% if messages and messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>

For each function call return <tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% elif messages and messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{%- for m in messages %}{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}{% for tool_call in m.tool_calls or [] %}
{%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments
if tool_call.arguments is string else tool_call.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}
{%- if c.type in ('image','image_url') %}@@IMAGE@@{% elif c.type == 'video' %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}{% elif 'text' in c %}{{ c.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{%- endif %}"""

TOKEN_NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "bos_token": None,
    "model_max_length": 131_072,
}
GEMMA_TOKEN_NAMES = TOKEN_NAMES | {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "bos_token": "<bos>",
}

# ---------------------------------------------------------------- text

CORE: Config = dict(  # what every text model of these has
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=256,
    vocab_size=checkpoints.VOCAB_SIZE,
)
DENSE: Config = dict(
    CORE,
    rms_norm_eps=1e-6,
    max_position_embeddings=131_072,
    rope_theta=1e6,
    tie_word_embeddings=False,
)
EXPERTS: Config = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
DELTA_NET: Config = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_conv_kernel_dim=4,
    full_attention_interval=2,
)
LATENT: Config = dict(  # multi-head latent attention with experts
    {
        name: value
        for name, value in DENSE.items()
        if name not in ("head_dim", "tie_word_embeddings")
    },
    num_hidden_layers=3,
    num_key_value_heads=4,
    rms_norm_eps=1e-5,
    moe_intermediate_size=64,
    n_shared_experts=1,
    n_routed_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    kv_lora_rank=64,
    q_lora_rank=64,
    qk_rope_head_dim=64,
    qk_nope_head_dim=64,
    v_head_dim=64,
)
TEXT: dict[str, Config] = {
    "qwen3": dict(DENSE),
    "llama": dict(DENSE, rms_norm_eps=1e-5, rope_theta=5e5),
    "qwen3_moe": dict(
        DENSE, **EXPERTS, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True
    ),
    "qwen3_5": dict(
        DENSE,
        **DELTA_NET,
        rope_parameters={
            "type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
        },
    ),
    "qwen3_next": dict(
        DENSE,
        **EXPERTS,
        **DELTA_NET,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        shared_expert_intermediate_size=64,
        partial_rotary_factor=0.25,
    ),
    "gpt_oss": dict(
        CORE,
        rms_norm_eps=1e-5,
        intermediate_size=128,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_theta=150_000,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma3_text": dict(
        CORE,
        rms_norm_eps=1e-6,
        max_position_embeddings=131_072,
        query_pre_attn_scalar=64,
        sliding_window=128,
        sliding_window_pattern=2,
    ),
    "glm4_moe_lite": dict(LATENT),
    "deepseek_v32": dict(
        LATENT,
        index_head_dim=64,
        index_n_heads=4,
        index_topk=128,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    ),
    "falcon_h1": dict(
        CORE,
        num_hidden_layers=3,
        rope_theta=1e6,
        tie_word_embeddings=False,
        mamba_d_ssm=256,
        mamba_d_head=64,
        mamba_n_heads=4,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_d_conv=4,
    ),
}

TINY_CORE: Config = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    intermediate_size=64,
)
TINY: dict[str, Config] = {  # 2 layers, for long traces on a slow CPU
    "qwen3": TEXT["qwen3"] | TINY_CORE,
    "qwen3_5": dict(
        TEXT["qwen3_5"] | TINY_CORE,
        linear_num_value_heads=1,
        linear_num_key_heads=1,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        rope_parameters=dict(TEXT["qwen3_5"]["rope_parameters"], mrope_section=[2, 1, 1]),
    ),
    "gpt_oss": dict(
        TEXT["gpt_oss"] | TINY_CORE,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=2,
        num_experts_per_tok=1,
    ),
}


def make_text(name: str, config: Config, target: Path, dtype: str, quant_bits: int | None) -> None:
    """Make a checkpoint for mlx_lm at `target`."""
    config = copy.deepcopy(config) | {"model_type": name}
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    checkpoints.randomise(model)
    weights = cast(model, dtype, getattr(model, "cast_predicate", lambda path: True))
    if quant_bits:
        model.load_weights(list(weights.items()))
        quantise(model, quant_bits)
        weights = dict(tree_flatten(model.parameters()))
        config["quantization"] = {"group_size": 64, "bits": quant_bits}
    save(target, config | {"architectures": ["Tiny"], "torch_dtype": dtype}, weights)


def quantise(model: nn.Module, bits: int) -> None:
    wanted = getattr(model, "quant_predicate", None)

    def is_quantised(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % 64:
            return False
        return wanted(path, module) if callable(wanted) else True

    nn.quantize(model, 64, bits, class_predicate=is_quantised)


def cast(model: nn.Module, dtype: str, is_cast: Callable[[str], bool]) -> dict[str, mx.array]:
    """Return the model's arrays by name, the floating ones that `is_cast` names as `dtype`."""
    return {
        name: array.astype(getattr(mx, dtype))
        if mx.issubdtype(array.dtype, mx.floating) and is_cast(name)
        else array
        for name, array in tree_flatten(model.parameters())
    }


def save(
    target: Path, config: Config, weights: dict[str, mx.array], preprocessor: Config | None = None
) -> None:
    """Write a whole checkpoint, in place of `target` if that is there."""
    is_gemma = config["model_type"] == "gemma3"
    marker = "<start_of_image>" if is_gemma else "<|vision_start|><|image_pad|><|vision_end|>"
    template = TEMPLATE.replace("@@IMAGE@@", marker)
    tokenizer = tokenizer_in(target.parent)
    ids = checkpoints.added_token_ids(tokenizer)
    shutil.rmtree(target, ignore_errors=True)
    with checkpoints.new_directory(target) as directory:
        shutil.copy(tokenizer, directory)
        checkpoints.write_tokenizer_config(
            directory, template, GEMMA_TOKEN_NAMES if is_gemma else TOKEN_NAMES
        )
        checkpoints.save_weights(directory, weights)
        end_ids = [ids[token] for token in checkpoints.END_TOKENS]
        checkpoints.write_json(directory / "config.json", config | {"eos_token_id": end_ids})
        if preprocessor:
            checkpoints.write_json(directory / "chat_template.json", {"chat_template": template})
            checkpoints.write_json(directory / "preprocessor_config.json", preprocessor)
            processor = {"processor_class": preprocessor["processor_class"]}
            processor |= {"image_seq_length": 16} if is_gemma else {}
            checkpoints.write_json(directory / "processor_config.json", processor)


def tokenizer_in(out: Path) -> Path:
    """Return the tokenizer that all fixtures of `out` share, trained on first use."""
    path = out / "_tokenizer" / "tokenizer.json"
    if not path.exists():
        with checkpoints.new_directory(path.parent) as directory:
            checkpoints.train_tokenizer(
                directory / path.name, checkpoints.QWEN_TOKENS + GEMMA_TOKENS
            )
    return path


# ---------------------------------------------------------------- vision

QWEN_VISION: Config = dict(
    hidden_size=64,
    intermediate_size=128,
    out_hidden_size=128,
    num_heads=2,
    spatial_merge_size=2,
    temporal_patch_size=2,
    in_channels=3,
)
QWEN3_VISION: Config = dict(QWEN_VISION, patch_size=16, num_position_embeddings=256)
ROPE_3D: Config = {"type": "default", "rope_type": "default", "mrope_interleaved": True}


def vision_configs(ids: dict[str, int]) -> dict[str, Config]:
    """Return the configurations of the vision fixtures; `ids` are the added tokens'."""
    qwen: Config = dict(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        vocab_size=checkpoints.VOCAB_SIZE,
    )
    return {
        "qwen2_5_vl": dict(
            qwen2_5_vl_text(),
            **qwen,
            vision_token_id=ids["<|vision_pad|>"],
            vision_config=qwen2_5_vl_vision(),
        ),
        "qwen3_vl": dict(
            qwen,
            model_type="qwen3_vl",
            text_config=dict(
                DENSE,
                model_type="qwen3_vl_text",
                rope_theta=5e6,
                rope_scaling=ROPE_3D | {"mrope_section": [12, 10, 10]},
            ),
            vision_config=dict(
                QWEN3_VISION, model_type="qwen3_vl", depth=3, deepstack_visual_indexes=[0, 1, 2]
            ),
        ),
        "gemma3": gemma3_config(ids),
        "qwen3_5_vl": dict(
            qwen,
            model_type="qwen3_5",
            text_config=qwen3_5_vl_text(),
            vision_config=dict(
                QWEN3_VISION, model_type="qwen3_5", depth=2, deepstack_visual_indexes=[]
            ),
        ),
    }


def qwen2_5_vl_text() -> Config:
    rope = {"type": "mrope", "mrope_section": [8, 12, 12], "rope_type": "default"}
    small = dict(num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1)
    return DENSE | small | {"model_type": "qwen2_5_vl", "rope_scaling": rope}


def qwen2_5_vl_vision() -> Config:
    return dict(
        QWEN_VISION,
        model_type="qwen2_5_vl",
        depth=2,
        patch_size=14,
        spatial_patch_size=14,
        window_size=112,
        fullatt_block_indexes=[1],
        in_chans=3,
        tokens_per_second=2,
    )


def qwen3_5_vl_text() -> Config:
    rope = dict(ROPE_3D, rope_theta=1e6, partial_rotary_factor=0.5, mrope_section=[6, 5, 5])
    return dict(DENSE, **DELTA_NET, model_type="qwen3_5_text", rope_parameters=rope)


def gemma3_config(ids: dict[str, int]) -> Config:
    return dict(
        model_type="gemma3",
        image_token_index=ids["<image_soft_token>"],
        image_token_id=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        pad_token_id=ids["<pad>"],
        mm_tokens_per_image=16,
        hidden_size=128,
        vocab_size=checkpoints.VOCAB_SIZE,
        text_config=dict(TEXT["gemma3_text"], model_type="gemma3_text", mm_tokens_per_image=16),
        vision_config=dict(
            model_type="siglip_vision_model",
            num_hidden_layers=2,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=2,
            patch_size=14,
            image_size=112,
            num_channels=3,
            layer_norm_eps=1e-6,
        ),
    )


def preprocessor(name: str) -> Config:
    """Return what `preprocessor_config.json` of a vision fixture says."""
    common: Config = dict(
        do_resize=True,
        do_rescale=True,
        do_normalize=True,
        do_convert_rgb=True,
        rescale_factor=1 / 255,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    if name == "gemma3":
        return dict(
            common,
            image_processor_type="Gemma3ImageProcessor",
            processor_class="Gemma3Processor",
            image_seq_length=16,
            do_pan_and_scan=None,
            size={"height": 112, "width": 112},
            resample=2,
        )
    unit = 28 if name == "qwen2_5_vl" else 32  # pixels of one image token, each way
    pixels = {"min_pixels": unit**2 * 4, "max_pixels": unit**2 * 256}
    common |= pixels | {"patch_size": unit // 2, "temporal_patch_size": 2, "merge_size": 2}
    if name == "qwen2_5_vl":
        kind, processor = "Qwen2VLImageProcessor", "Qwen2_5_VLProcessor"
    else:
        kind, processor = "Qwen2VLImageProcessorFast", "Qwen3VLProcessor"
        edges = {"shortest_edge": pixels["min_pixels"], "longest_edge": pixels["max_pixels"]}
        common["size"] = edges
    return common | {"image_processor_type": kind, "processor_class": processor}


def make_vision(name: str, config: Config, target: Path, dtype: str) -> None:
    """Make a checkpoint for mlx_vlm at `target`."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    module, _ = get_model_and_args(copy.deepcopy(config))
    filled = copy.deepcopy(config)
    parts = ["text", "vision", "perceiver", "projector", "audio"]
    arguments = module.ModelConfig.from_dict(filled)
    model = module.Model(update_module_configs(arguments, module, filled, parts))
    checkpoints.randomise(model)
    if name == "gemma3":
        untie_gemma3(model)
    is_cast = getattr(model, "cast_predicate", None) or (lambda path: "A_log" not in path)
    save(target, config | {"torch_dtype": dtype}, cast(model, dtype, is_cast), preprocessor(name))


def untie_gemma3(model: Any) -> None:
    """Make up for mlx_vlm tying gemma3's head to its embedding at load, whatever the file says."""
    language, projector = model.language_model.model, model.multi_modal_projector
    language.embed_tokens.weight = language.embed_tokens.weight * 0.05
    language.norm.weight = language.norm.weight * 0 + 10.0
    shape = projector.mm_input_projection_weight.shape
    projector.mm_input_projection_weight = mx.random.normal(shape, key=mx.random.key(1)) * 0.5


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names, comma-separated; else all")
    parser.add_argument("--dtype", choices=DTYPE_LABELS, default="float32")
    parser.add_argument("--quant", type=int, metavar="BITS", help="text fixtures only")
    parser.add_argument("--tiny", action="store_true", help="2 layers: " + ", ".join(TINY))
    options = parser.parse_args()
    text, vision = TINY if options.tiny else TEXT, {}
    if not options.tiny and not options.quant:
        vision = vision_configs(checkpoints.added_token_ids(tokenizer_in(options.out)))
    names = [name for name in options.only.split(",") if name] or [*text, *vision]
    if unknown := [name for name in names if name not in text | vision]:
        parser.error(f"no fixture {', '.join(unknown)}; there are {', '.join(text | vision)}")
    label = ("tiny-" if options.tiny else "") + DTYPE_LABELS[options.dtype]
    label += f"-q{options.quant}" if options.quant else ""
    for name in names:
        target = options.out / f"{name}-{label}"
        if name in text:
            make_text(name, text[name], target, options.dtype, options.quant)
        else:
            make_vision(name, vision[name], target, options.dtype)
        print(target)


if __name__ == "__main__":
    main()
