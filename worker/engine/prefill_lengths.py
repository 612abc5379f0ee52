"""Tells by a model's layers and the chip how many tokens its forwards should read.

Of Apple's GPUs nothing here was measured by us: the numbers are others', see the constants.
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
# Source: the performance notes of Rapid-MLX (August 2026, M3 Ultra), 512 tokens a forward
# against 2,048: dense 4B and 9B within 0.7 %, a hybrid of 27B 3 % slower, LFM2.5 9 %, a mixture of
# experts (35B-A3B) 16 %; vllm-mlx's issue 174: one of 122B is 22 % faster with 2,048.
CHUNK_DENSE, CHUNK_STATES, CHUNK_EXPERTS = 512, 1024, 2048
# A short forward reads nearly as many experts as a long one.
GAP_EXPERTS: Final = 256
# MLX's fused attention for this head takes so many queries at least, on M5 and later. Source:
# mlx/backend/metal/scaled_dot_product_attention.cpp, `use_fallback`.
FUSED_QUERIES, FUSED_HEAD = 1024, 256
M5_GENERATION: Final = 17
# Of a forward that others' answers wait for: less is hardly any faster.
FLOOR, FLOOR_EXPERTS = 128, 256
# A chunk of 512 writes this many scores a head, where it writes any, at most but for the floor.
SCORES_MAX: Final = CHUNK_DENSE * FULL_TO


@dataclass(frozen=True, slots=True)
class PrefillLengths:
    """Says how a model's prompts are cut on this chip, where no setting says otherwise."""

    chunk: int  # tokens of a forward
    gap: int = HEADER_GAP  # tokens that a message's header is worth a forward for
    step_min: int = STEP_MIN  # see `PrefillGrid`
    full_to: int = FULL_TO
    beside_min: int = FLOOR  # tokens of a forward that others' answers wait for


def prefill_lengths(loaded: LoadedModel) -> PrefillLengths:
    """Return the lengths for a model on the device that it was loaded to."""
    network = network_of(loaded)
    config = loaded.config.get("text_config") or loaded.config
    return lengths_for(
        config,
        backend(),
        device_architecture(),
        # Whether a layer reads some of its weights only: upstream's Switch layers, and their kin.
        has_experts=any("Switch" in type(module).__name__ for _, module in network.named_modules()),
        keeps_states=ArraysCache.__name__ in loaded.facts.cache_layout,
    )


def network_of(loaded: LoadedModel) -> nn.Module:
    """Return upstream's module of a loaded model's language model."""
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
    """Return the lengths for a kind of model on a device, as `mx.device_info()` names it."""
    beside_min = FLOOR_EXPERTS if has_experts else FLOOR
    if backend_name == "cpu":
        return PrefillLengths(CHUNK_CPU, beside_min=beside_min)
    chunk = CHUNK_EXPERTS if has_experts else CHUNK_STATES if keeps_states else CHUNK_DENSE
    gap = GAP_EXPERTS if has_experts else HEADER_GAP
    step_min, full_to = CHUNK_DENSE if has_experts else STEP_MIN, FULL_TO
    name, _, rest = architecture.partition("_g")  # of an M5 e.g. "applegpu_g17s"
    generation = int(rest[:2]) if name == "applegpu" and rest[:2].isdigit() else 0
    if head_size_of(config) == FUSED_HEAD and generation >= M5_GENERATION:
        chunk, step_min = max(chunk, FUSED_QUERIES), FUSED_QUERIES
    if writes_scores(config, backend_name):
        full_to = SCORES_MAX // chunk
    return PrefillLengths(chunk, gap, step_min, full_to, beside_min)
