"""Chooses how many tokens a prefill's forward reads, by the model's layers and the chip.

The numbers for Apple's GPUs were measured by others; the constants name the sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from hearth.worker.cache.prefill_grid import FULL_TO, HEADER_GAP, STEP_MIN
from hearth.worker.engine.compute_dtype import device_architecture
from hearth.worker.engine.forward_memory import head_size_of, writes_scores
from hearth.worker.engine.model_loader import LoadedModel, backend

CHUNK_CPU: Final = 256
# With 512 tokens per forward instead of 2,048, dense models of 4B and 9B differ by at most 0.7 %; a
# hybrid of 27B is 3 % slower, LFM2.5 9 %, a mixture of experts (35B-A3B) 16 %. Source: the
# performance notes of Rapid-MLX (August 2026, M3 Ultra). A mixture of experts of 122B is 22 %
# faster with 2,048. Source: vllm-mlx's issue 174.
CHUNK_DENSE, CHUNK_STATES, CHUNK_EXPERTS = 512, 1024, 2048
# Larger with experts, as a short forward reads nearly as many experts as a long one.
GAP_EXPERTS: Final = 256
# MLX's fused attention for heads of this size needs at least this many queries, on M5 and later.
# Source: mlx/backend/metal/scaled_dot_product_attention.cpp, `use_fallback`.
FUSED_QUERIES, FUSED_HEAD = 1024, 256
M5_GENERATION: Final = 17
# Tokens of a forward that other requests' answers wait for. Shorter forwards are hardly faster.
FLOOR, FLOOR_EXPERTS = 128, 256
# The most scores that a chunk writes for each head, if attention writes scores at all.
SCORES_MAX: Final = CHUNK_DENSE * FULL_TO


@dataclass(frozen=True, slots=True)
class PrefillLengths:
    """The lengths by which a model's prompts are cut on this chip. Settings may override them."""

    chunk: int  # tokens of a forward
    gap: int = HEADER_GAP  # least tokens from the last cut to a cut at a message's header
    step_min: int = STEP_MIN  # see `PrefillGrid`
    full_to: int = FULL_TO  # see `PrefillGrid`
    beside_min: int = FLOOR  # least tokens of a forward that other requests' answers wait for


def prefill_lengths(loaded: LoadedModel) -> PrefillLengths:
    """Return the lengths for a model on the device that it was loaded to."""
    network = network_of(loaded)
    config = loaded.config.get("text_config") or loaded.config
    return lengths_for(
        config,
        backend(),
        device_architecture(),
        # Upstream's layers of experts have "Switch" in their class names.
        has_experts=any("Switch" in type(module).__name__ for _, module in network.named_modules()),
        keeps_states=ArraysCache.__name__ in loaded.facts.cache_layout,
    )


def network_of(loaded: LoadedModel) -> nn.Module:
    """Return upstream's module of the language model."""
    model = loaded.model if isinstance(loaded.model, nn.Module) else loaded.model.model
    assert isinstance(model, nn.Module), type(model)
    return model


def lengths_for(
    config: Mapping[str, Any],
    backend_name: str,
    architecture: str,
    *,
    has_experts: bool = False,
    keeps_states: bool = False,
) -> PrefillLengths:
    """Return the lengths for a kind of model on a device.

    `architecture` is the device's name in `mx.device_info()`.
    """
    beside_min = FLOOR_EXPERTS if has_experts else FLOOR
    if backend_name == "cpu":
        return PrefillLengths(CHUNK_CPU, beside_min=beside_min)
    chunk = CHUNK_EXPERTS if has_experts else CHUNK_STATES if keeps_states else CHUNK_DENSE
    gap = GAP_EXPERTS if has_experts else HEADER_GAP
    step_min, full_to = CHUNK_DENSE if has_experts else STEP_MIN, FULL_TO
    name, _, rest = architecture.partition("_g")  # e.g. "applegpu_g17s" for an M5
    generation = int(rest[:2]) if name == "applegpu" and rest[:2].isdigit() else 0
    if head_size_of(config) == FUSED_HEAD and generation >= M5_GENERATION:
        chunk, step_min = max(chunk, FUSED_QUERIES), FUSED_QUERIES
    if writes_scores(config, backend_name):
        full_to = SCORES_MAX // chunk
    return PrefillLengths(chunk, gap, step_min, full_to, beside_min)
