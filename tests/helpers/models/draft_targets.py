"""Makes small models of the kinds that mlx-vlm's draft models draft for, each with a random one."""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_map

from hearth.worker.engine.decode.draft_model import DraftModel
from hearth.worker.engine.decode.draft_model_loader import KINDS
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.vision.vlm_language_model import VLMLanguageModel
from hearth.worker.engine.vision.vlm_loader import VisionModel
from hearth.worker.kv.layer_adapters import raw_rows
from scripts.fixtures import checkpoint_files
from scripts.harness.socketless_worker import loaded
from tests.helpers.models.draft_heads import random_draft_model

VOCABULARY: Final = 3072
WINDOW: Final = 24
_HEADS: Final = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32)
_CORE: Final[Mapping[str, Any]] = dict(
    _HEADS, vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256
)
_TOWER: Final = dict(
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    patch_size=16,
    image_size=32,
)


@dataclass(frozen=True)
class DraftTarget:
    """A model, and what a draft model for it is: its kind, and its config.json."""

    loaded: LoadedModel
    kind: str
    config: dict[str, Any]

    def random_head(self, seed: int) -> Any:
        """Return mlx-vlm's draft model, with random weights."""
        return random_draft_model(self.config, seed)

    @property
    def model(self) -> Any:
        """The model as a head is bound to it: mlx-vlm's whole one, or mlx-lm's."""
        return self.loaded.model if self.loaded.vision is None else self.loaded.vision.model

    def draft_model(self, head: Any) -> DraftModel:
        return DraftModel(head, self.model, drafts=KINDS[self.kind].drafts, raw_rows=raw_rows)


def _nemotron() -> tuple[dict[str, Any], dict[str, Any]]:
    text = dict(
        _CORE,
        model_type="nemotron_h",
        num_hidden_layers=4,
        hybrid_override_pattern=["M", "*", "M", "E"],
        max_position_embeddings=4096,
        **dict(mamba_num_heads=4, mamba_head_dim=64, ssm_state_size=64, conv_kernel=4, n_groups=1),
        **dict(attention_bias=False, mamba_proj_bias=False, mlp_bias=False, use_bias=False),
        **dict(use_conv_bias=True, layer_norm_epsilon=1e-5, time_step_limit=(0.0, float("inf"))),
        **dict(moe_intermediate_size=64, moe_shared_expert_intermediate_size=64),
        **dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
        **dict(n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0),
        **dict(num_nextn_predict_layers=1, mtp_hybrid_override_pattern=["*", "E"]),
    )
    model = dict(
        model_type="nemotron_h_nano_omni",
        text_config=text,
        vision_config=dict(_TOWER),
        projector_hidden_size=64,
        vit_hidden_size=64,
        img_context_token_id=5,
    )
    return model, dict(text_config=text)


def _inkling() -> tuple[dict[str, Any], dict[str, Any]]:
    text = dict(
        _CORE,
        num_hidden_layers=2,
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "sparse"],
        dense_intermediate_size=128,
        **dict(swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=32),
        **dict(sliding_window_size=WINDOW, rel_extent=32, d_rel=4),
        **dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    )
    model = dict(
        model_type="inkling",
        text_config=text,
        vocab_size=VOCABULARY,
        vision_config=dict(text_hidden_size=128, n_layers=4, patch_size=8),
    )
    return model, dict(text_config=text, num_mtp_layers=2)


def _gemma4(**how: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Windows and whole layers by turns; `how` says what is otherwise than in the largest ones."""
    text = dict(
        _CORE,
        model_type="gemma4_text",
        global_head_dim=32,
        num_hidden_layers=6,
        sliding_window=WINDOW,
        sliding_window_pattern=3,
        vocab_size_per_layer_input=VOCABULARY,
        **(dict(num_kv_shared_layers=0, hidden_size_per_layer_input=0) | how),
    )
    model = dict(
        model_type="gemma4",
        text_config=text,
        vision_config=dict(_TOWER, **dict(_HEADS, head_dim=16, global_head_dim=16)),
        vocab_size=VOCABULARY,
        hidden_size=128,
    )
    drafting = text | dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=0,
    )
    return model, dict(text_config=drafting, backbone_hidden_size=128)


def _unified(
    model: dict[str, Any], drafting: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    text = model["text_config"] | dict(attention_k_eq_v=True, num_global_key_value_heads=1)
    tower = dict(mm_embed_dim=64, mm_posemb_size=16, model_patch_size=16)
    unified = dict(model, model_type="gemma4_unified", text_config=text, vision_config=tower)
    spoken = drafting["text_config"] | dict(attention_k_eq_v=True, num_global_key_value_heads=1)
    return unified, dict(drafting, text_config=spoken)


# A kind of draft model, and what follows a colon, is made so.
_MADE: Final[Mapping[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]]] = {
    "nemotron_h_mtp": _nemotron,
    "inkling_mtp": _inkling,
    "gemma4_assistant": _gemma4,
    "gemma4_assistant: layers share KV": functools.partial(
        _gemma4, num_kv_shared_layers=2, hidden_size_per_layer_input=16
    ),
    "gemma4_unified_assistant": lambda: _unified(*_gemma4()),
}
# Which mlx-lm loads:
_QWEN_TEXT, _GEMMA_TEXT = "qwen3_5_mtp: text alone", "gemma4_assistant: text alone"
TEXT_ALONE: Final = (_QWEN_TEXT, _GEMMA_TEXT)
DRAFT_TARGETS: Final = ("qwen3_5_mtp", *_MADE, *TEXT_ALONE)


@functools.cache
def draft_target(name: str) -> DraftTarget:
    """Return one of DRAFT_TARGETS."""
    kind = name.split(":")[0]
    if kind == "qwen3_5_mtp":
        model = loaded("qwen3_5" if name == _QWEN_TEXT else "qwen3_5_vl")
        text = model.config.get("text_config", model.config) | {"mtp_num_hidden_layers": 1}
        return DraftTarget(model, kind, dict(model_type=kind, text_config=text))
    if name == _GEMMA_TEXT:
        config, drafting = _gemma4(num_kv_shared_layers=2)
        return DraftTarget(_loaded_text(config), kind, dict(drafting, model_type=kind))
    config, drafting = _MADE[name]()
    return DraftTarget(_loaded(config), kind, dict(drafting, model_type=kind))


def _loaded(config: dict[str, Any]) -> LoadedModel:
    """Return a model of random weights as a worker has it; the tokenizer is a fixture's."""
    from mlx_vlm.models.cache import make_prompt_cache

    model = checkpoint_files.vision_model(config)
    model.update(tree_map(lambda weight: weight.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    spoken = model.language_model
    adapter = VLMLanguageModel(spoken, functools.partial(make_prompt_cache, spoken))
    vision = VisionModel(model, adapter, None)
    base = loaded("qwen3_vl")
    facts = replace(base.facts, architecture=config["model_type"])
    return replace(base, model=adapter, vision=vision, config=config, facts=facts)


def _loaded_text(config: dict[str, Any]) -> LoadedModel:
    """Return the language model alone, as mlx-lm makes it."""
    from mlx_lm.models import gemma4

    model = gemma4.Model(gemma4.ModelArgs.from_dict(copy.deepcopy(config)))
    checkpoint_files.randomise(model)
    base = loaded("qwen3")
    facts = replace(base.facts, architecture=config["model_type"])
    return replace(base, model=model, config=config, facts=facts)
