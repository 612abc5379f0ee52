"""Estimates how much memory a prefill's forward takes in addition to weights and KV.

Without a fused kernel most of this memory is attention scores: one for each head, each token of the
chunk, and each token before that token. At 100,000 tokens, chunks of 512 and 24 heads that is
2.4 GB.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.engine.model_loader import LoadedModel

# Head sizes for which MLX has a fused kernel for more than 8 queries on Metal. On a CPU nothing is
# fused. Source: mlx/backend/metal/scaled_dot_product_attention.cpp, `use_fallback`.
FUSED_HEAD_SIZES: Final = frozenset((64, 80, 128))

# How many arrays of scores are alive at once, measured on MLX's CPU backend
# (tests/unit/worker/engine/test_mlx_memory.py).
_PLAIN: Final = 1
_WITH_SINKS: Final = 3
_LATENT: Final = 3  # MLA adds the scores of its two halves outside any kernel
_INDEXED: Final = 5  # DeepSeek's indexer scores every pair too
# Activations that are alive at once, as a multiple of those that one layer computes.
_ACTIVATIONS: Final = 1.5
_RECURRENT_BY_OPERATIONS: Final = 6.0  # a recurrence without a kernel keeps each step's arrays
_RECURRENT_BY_KERNEL: Final = 2.0


@dataclass(frozen=True, slots=True)
class ForwardMemory:
    """Estimates the bytes of a prompt's largest forward."""

    grid: PrefillGrid | None = None  # cuts the prompt into forwards; None = forwards take nothing
    token_bytes: int = 0  # activations of one token
    pair_bytes: int = 0  # scores of one pair of tokens; 0 with a fused kernel
    depth_bytes: int = 0  # per token before the chunk: MLA unfolds its latents
    fixed_bytes: int = 0  # per forward: an adapter's weights joined with the model's

    def bytes_at(self, depth: int) -> int:
        """Return the bytes of the largest forward of a prompt of `depth` tokens.

        Chunks get shorter with depth, so an earlier, longer chunk may take more than the last one.
        """
        assert depth >= 0, depth
        if self.grid is None:
            return 0
        sizes = []
        for end in self.grid.step_ends(depth):
            tokens = min(self.grid.step_at(max(0, end - 1)), end)
            sizes.append(
                tokens * (self.token_bytes + end * self.pair_bytes) + end * self.depth_bytes
            )
        return self.fixed_bytes + max(sizes)


def forward_of(loaded: LoadedModel, grid: PrefillGrid) -> ForwardMemory:
    """Return the estimate for a model whose prompts are prefilled in the chunks of `grid`."""
    text = loaded.config.get("text_config") or loaded.config
    dtypes = (array.dtype for _, array in tree_flatten(loaded.model.parameters()))
    sizes = (dtype.size for dtype in dtypes if mx.issubdtype(dtype, mx.floating))
    memory = forward_memory(text, grid, max(sizes, default=4), loaded.facts.backend)
    token_bytes = memory.token_bytes + loaded.adapters.token_bytes
    return replace(memory, token_bytes=token_bytes, fixed_bytes=loaded.adapters.forward_bytes)


def forward_memory(
    config: Mapping[str, Any], grid: PrefillGrid, item_bytes: int, backend: str
) -> ForwardMemory:
    """Return the estimate for a text model's `config`, with `item_bytes` for each number computed.

    Sizes that `config` has under other names count as 0; `working_bytes` is then the only reserve.
    """
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    head_size = head_size_of(config)
    is_latent = _is_latent(config)
    unfolded = _size(config, "qk_nope_head_dim") + _size(config, "v_head_dim")
    if is_latent:
        head_size = _size(config, "qk_nope_head_dim") + _size(config, "qk_rope_head_dim")
    experts = _size(config, "num_experts_per_tok") * _size(config, "moe_intermediate_size")
    experts += _size(config, "shared_expert_intermediate_size")
    inner = max(_size(config, "intermediate_size"), experts)
    token_items = 6 * hidden + 3 * inner + 4 * heads * head_size
    recurrent = ("linear_num_", "mamba_", "ssm_")
    live = _ACTIVATIONS
    if any(name.startswith(recurrent) for name, value in config.items() if value):
        live = _RECURRENT_BY_OPERATIONS if backend == "cpu" else _RECURRENT_BY_KERNEL
    return ForwardMemory(
        grid,
        round(token_items * item_bytes * live),
        round(heads * item_bytes * _scores(config, head_size, is_latent, backend)),
        heads * item_bytes * unfolded if is_latent else 0,
    )


def head_size_of(config: Mapping[str, Any]) -> int:
    """Return the size of an attention head; 0 if the config does not have it."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    return _size(config, "head_dim") or (hidden // heads if heads else 0)


def writes_scores(config: Mapping[str, Any], backend: str) -> bool:
    """Whether attention writes its scores to memory, a number for each pair of tokens."""
    return _scores(config, head_size_of(config), _is_latent(config), backend) > 0


def _is_latent(config: Mapping[str, Any]) -> bool:
    return bool(_size(config, "kv_lora_rank"))


def _scores(config: Mapping[str, Any], head_size: int, is_latent: bool, backend: str) -> float:
    """Return how many arrays of scores are alive at once."""
    if _size(config, "index_n_heads"):
        return _INDEXED
    if is_latent:
        return _LATENT
    if backend != "cpu" and head_size in FUSED_HEAD_SIZES:
        return 0
    mask = 0.25 if backend == "cpu" else 0.5  # one byte for each pair, shared by all heads
    return (_WITH_SINKS if config.get("model_type") == "gpt_oss" else _PLAIN) + mask


def _size(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
