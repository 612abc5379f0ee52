"""Tells how much memory is left free for EMBEDDING_MODEL and RERANK_MODEL, and so for workers.

Both are in a process of their own, which takes memory only while it is used. What it can take is
kept free all the time: a worker that had it would have to give KV back just as a document is read.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.shared.models.local_models import local_models, matching_whole
from hearth.shared.models.model_path import named_model
from hearth.shared.settings import Settings
from hearth.worker.cache.prefill_grid import WHOLE
from hearth.worker.embeddings.length_batches import (
    MLX_CACHE_BYTES,
    SQUARE_MAX,
    TEXT_TOKENS_MAX,
    TOKENS_MAX,
)
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.forward_memory import forward_memory
from hearth.worker.engine.model_loader import backend
from hearth.worker.engine.vision.vlm_loader import read_json

# What a process takes beside its arrays once its model is loaded: Python, libraries, a tokenizer.
# On Linux measured with three tiny models (99 MB: /v1/cache, beside_arrays_bytes); on a Mac, whose
# driver holds more, assumed.
BESIDE_BYTES: Final = 100 * mlx_memory.MB
BESIDE_MAC_BYTES: Final = 900 * mlx_memory.MB
ITEM_BYTES: Final = 4  # vectors are computed in float32
MASKS: Final = 2  # of tokens by tokens that a forward keeps: the causal one, and that with padding
# Of 16 bits, which a product takes in float32: measured live at once on a CPU, 4.6 of the largest.
CAST_MATRICES: Final = 5


def beside_bytes() -> int:
    """Return what a process on this machine takes beside its arrays."""
    return BESIDE_MAC_BYTES if backend() == "metal" else BESIDE_BYTES


def workers_limit(settings: Settings) -> int:
    """Return how many bytes all workers of this machine may take, beside the encoders."""
    return max(0, mlx_memory.memory_limit(settings) - encoders_bytes(settings))


def encoders_bytes(settings: Settings) -> int:
    """Return what the process of both models takes at most; 0 where none is set.

    A model that is not on this disk yet counts without its weights.
    """
    sources = {
        "EMBEDDING_MODEL": settings.embedding_model,
        "RERANK_MODEL": settings.rerank_model,
    }
    models = [_directory(source, name) for name, source in sources.items() if source]
    if not models:
        return 0
    known = [directory for directory in models if directory is not None]
    return process_bytes(known, sum(map(mlx_memory.weight_bytes, known)))


def process_bytes(directories: Sequence[Path], weight_bytes: int) -> int:
    """Return what a process with the models of `directories` takes, whose weights are so long."""
    configs = [read_json(directory / "config.json") for directory in directories]
    forward = max(map(forward_bytes, configs), default=0)
    return beside_bytes() + MLX_CACHE_BYTES + weight_bytes + forward


def forward_bytes(config: dict[str, Any]) -> int:
    """Return what the greediest forward takes beside the weights, as it is estimated."""
    positions = config.get("max_position_embeddings")
    longest = min(TEXT_TOKENS_MAX, positions) if isinstance(positions, int) else TEXT_TOKENS_MAX
    pairs = max(min(SQUARE_MAX, TOKENS_MAX * longest), longest * longest)
    told = forward_memory(config, WHOLE, ITEM_BYTES, backend())
    pair_bytes = told.pair_bytes + MASKS * ITEM_BYTES
    return max(TOKENS_MAX, longest) * told.token_bytes + pairs * pair_bytes + _cast_bytes(config)


def _cast_bytes(config: dict[str, Any]) -> int:
    """Return what copies of matrices take; quantised ones are multiplied as they are."""
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if config.get("quantization") or not (isinstance(hidden, int) and isinstance(inner, int)):
        return 0
    return CAST_MATRICES * hidden * inner * ITEM_BYTES


def _directory(source: str, setting: str) -> Path | None:
    """Return where the files of a model are; None where they are not here yet."""
    try:
        named = named_model(source, setting)
    except StartError:  # which the proxy has told
        return None
    if isinstance(named, Path):
        return named
    found = matching_whole(named, local_models())
    return found[0].directory if found else None
