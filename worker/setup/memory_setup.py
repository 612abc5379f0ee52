"""Keeps a worker within its share of the machine's memory, from loading the model to the end.

EMBEDDING_MODEL and RERANK_MODEL have a process of their own, which takes memory only while in use.
The memory for that process always stays free; otherwise a worker would have to release KV whenever
a document is embedded.
"""

import bisect
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hearth.shared.errors import StartError
from hearth.shared.models.local_models import local_models, matching_whole
from hearth.shared.models.model_path import named_model
from hearth.shared.settings import CACHE_RAM_MB_UNKNOWN, Settings
from hearth.worker.cache.extent_store import MB
from hearth.worker.cache.prefill_grid import WHOLE
from hearth.worker.embeddings.length_batches import (
    MLX_CACHE_BYTES,
    SQUARE_MAX,
    TOKENS_MAX,
    TOKENS_MAX as TEXT_TOKENS_MAX,
)
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.forward_memory import ForwardMemory, forward_memory
from hearth.worker.engine.mlx_memory import MemoryShare, working_bytes
from hearth.worker.engine.model_loader import LoadedModel, backend
from hearth.worker.engine.system_state import MemoryUse, system_pressure
from hearth.worker.engine.vision.vlm_loader import read_json
from hearth.worker.kv.kv_manager import KVManager, NullKVManager
from hearth.worker.schedule.memory_guard import MemoryGuard, PressureRelief
from hearth.worker.setup.rank_setup import UNLIMITED, SingleRank

# Bytes of a process with a loaded model, without arrays: Python, libraries, a tokenizer.
# The value for Linux was measured with three tiny models (99 MB: /v1/cache, beside_arrays_bytes).
# The value for a Mac, whose driver takes more, is assumed.
BESIDE_BYTES: Final = 100 * mlx_memory.MB
BESIDE_MAC_BYTES: Final = 900 * mlx_memory.MB
ITEM_BYTES: Final = 4  # vectors are computed in float32
MASKS: Final = 2  # masks (tokens, tokens) of a forward: causal, and causal with padding
# Float32 copies of 16-bit matrices that exist at once during products. Measured on a CPU: 4.6
# copies of the largest matrix.
CAST_MATRICES: Final = 5


def beside_bytes() -> int:
    """Return the bytes that a process on this machine takes besides its arrays."""
    return BESIDE_MAC_BYTES if backend() == "metal" else BESIDE_BYTES


def workers_limit(settings: Settings) -> int:
    """Return how many bytes all workers of this machine may take together, without encoders."""
    return max(0, mlx_memory.memory_limit(settings) - encoders_bytes(settings))


def encoders_bytes(settings: Settings) -> int:
    """Return the most bytes that the process of the encoder models takes; 0 if none is set.

    If a model is not on disk yet, its weights are not counted.
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
    """Return the bytes of a process with the models of `directories`, weights included."""
    configs = [read_json(directory / "config.json") for directory in directories]
    forward = max(map(forward_bytes, configs), default=0)
    return beside_bytes() + MLX_CACHE_BYTES + weight_bytes + forward


def forward_bytes(config: dict[str, Any]) -> int:
    """Return the estimated bytes of the largest forward, without the weights."""
    positions = config.get("max_position_embeddings")
    longest = min(TEXT_TOKENS_MAX, positions) if isinstance(positions, int) else TEXT_TOKENS_MAX
    pairs = max(min(SQUARE_MAX, TOKENS_MAX * longest), longest * longest)
    memory = forward_memory(config, WHOLE, ITEM_BYTES, backend())
    pair_bytes = memory.pair_bytes + MASKS * ITEM_BYTES
    return max(TOKENS_MAX, longest) * memory.token_bytes + pairs * pair_bytes + _cast_bytes(config)


def _cast_bytes(config: dict[str, Any]) -> int:
    """Return the bytes of float32 copies of matrices; quantised matrices are not copied."""
    hidden, inner = config.get("hidden_size"), config.get("intermediate_size")
    if config.get("quantization") or not (isinstance(hidden, int) and isinstance(inner, int)):
        return 0
    return CAST_MATRICES * hidden * inner * ITEM_BYTES


def _directory(source: str, setting: str) -> Path | None:
    """Return the directory of a model's files; None if the files are not on disk yet."""
    try:
        named = named_model(source, setting)
    except StartError:  # the proxy has reported the error
        return None
    if isinstance(named, Path):
        return named
    matches = matching_whole(named, local_models())
    return matches[0].directory if matches else None


LIVE_SHARE_MIN: Final = 4  # requests get at least 1 / 4 of the room, so that several can run
LIVE_SHARE_MAX: Final = 2  # requests get at most 1 / 2; beyond that, kept KV is evicted
IDLE_SHARE: Final = 2  # idle live caches may take 1 / 2 of the requests' part


@dataclass(frozen=True, slots=True)
class KVRoom:
    """Divides the room for KV; what neither limit covers is free for new requests."""

    kept_bytes: int  # limit of kept KV
    idle_bytes: int  # limit of live caches that no request uses


def divide_room(
    limit: int, model_bytes: int, slot_bytes: int, forward_bytes: int, overhead: float = 0.0
) -> KVRoom:
    """Return the default limits of kept KV and of idle live caches, in bytes of arrays.

    `limit` is the worker's limit, `model_bytes` the worker's use without any KV, `slot_bytes` the
    KV of one sequence as long as the context, `forward_bytes` the memory of a forward at that
    depth, and `overhead` the further bytes that the system counts for each byte of arrays.

    The requests' part is what one sequence as long as the context needs, within LIVE_SHARE_MIN and
    LIVE_SHARE_MAX. So even with full kept KV, such a prompt is read without evictions. If memory
    limits the context, the longest prompt may need more than half of the room; then kept KV is
    evicted.
    """
    assert min(limit, model_bytes, slot_bytes, forward_bytes) >= 0 and overhead >= 0
    room = int(max(0, limit - model_bytes - working_bytes(limit)) / (1 + overhead))
    wanted = slot_bytes + int(forward_bytes / (1 + overhead))
    live = min(max(wanted, room // LIVE_SHARE_MIN), room // LIVE_SHARE_MAX)
    return KVRoom(room - live, live // IDLE_SHARE)


MEASURE_S: Final = 0.5  # seconds between two measurements of this process and other workers
CONTEXT_TOKENS_MIN: Final = 256
GB: Final = mlx_memory.GB

log = logging.getLogger(__name__)


class WorkerMemory:
    """Holds this worker's memory limit and measures its use. Owner: the inference thread."""

    def __init__(self, settings: Settings, endpoint: str, rank: SingleRank | None = None) -> None:
        self._settings = settings
        self._rank = rank or SingleRank()
        self._rank_limit = UNLIMITED  # as of the last measurement
        self.encoders_bytes = encoders_bytes(settings)
        total = workers_limit(settings) // self._rank.ranks_here
        if self.encoders_bytes:
            log.info(
                "%.1f GB are left free for EMBEDDING_MODEL and RERANK_MODEL, %.1f GB are the "
                "workers'",
                self.encoders_bytes / GB,
                total / GB,
            )
        self.share = MemoryShare(endpoint, total, settings.workers, mlx_memory.set_memory_limit)
        self.use = MemoryUse()
        self._measured_at = time.monotonic()
        # Called when this worker's limit has changed.
        self._share_out_again: Callable[[], None] = lambda: None

    def admit(self, nbytes: int) -> None:
        """Reserve memory for weights of `nbytes`, before they are read.

        Raises:
            StartError: these weights and those of other workers do not fit together.
        """
        share, settings = self.share, self._settings
        share.claim(nbytes)
        try:
            mlx_memory.refuse_heavy(
                nbytes,
                settings.model_path,
                share.total,
                share.others_bytes,
                encoders=self.encoders_bytes,
            )
        except Exception:
            share.release()
            raise
        mlx_memory.wire(nbytes)

    def dense_bytes_max(self) -> int:
        """Return how many bytes a model's dense weights may take on a CPU."""
        share = self.share
        share.read_others()
        return mlx_memory.dense_bytes_max(share.total, self._settings.workers, share.others_bytes)

    def loaded(self, sizes: Iterable[int]) -> None:
        """Record that model and image encoder are loaded, before anything is computed.

        `sizes` are the bytes of each weight.
        """
        mlx_memory.wire_loaded(sizes)
        self.use.measure()

    def fit(
        self, loaded: LoadedModel, slot_bytes: Callable[[int], int], forward: ForwardMemory
    ) -> LoadedModel:
        """Return the model with the longest context that fits for one sequence.

        `slot_bytes` maps a number of tokens to the bytes of their KV.

        Raises:
            StartError: fewer than CONTEXT_TOKENS_MIN tokens fit.
        """
        facts, limit = loaded.facts, self.share.expected_limit
        limit = min(limit, self._rank.limit(self.use.bytes_used()))
        room = limit - self.use.bytes_used() - working_bytes(limit)
        factor = 1 + self.use.overhead
        tokens = fitting_tokens(
            facts.context_tokens, room, lambda rows: round(slot_bytes(rows) * factor), forward
        )
        if tokens == facts.context_tokens:
            return loaded
        if tokens < CONTEXT_TOKENS_MIN:
            ranks = facts.ranks
            parts = f" over {ranks} ranks" if ranks > 1 else ""
            more = "more RANKS" if ranks > 1 else "KV_BITS=8"  # several ranks cannot have KV_BITS
            raise StartError(
                f"MODEL_PATH is {self._settings.model_path!r}, beside whose weights "
                f"({facts.weight_bytes / GB:.1f} GB{parts}) a context of {tokens:,} tokens fits "
                f"into {limit / GB:.1f} GB; {CONTEXT_TOKENS_MIN:,} are the least. Use a smaller "
                f"model or one of fewer bits, set {more} or fewer WORKERS, or raise "
                "MEMORY_LIMIT_MB."
            )
        log.warning(
            "the context is %s tokens, not %s: more does not fit into %.1f GB beside the model",
            f"{tokens:,}",
            f"{facts.context_tokens:,}",
            limit / GB,
        )
        return replace(loaded, facts=replace(facts, context_tokens=tokens, context_by="memory"))

    def guard(self, forward: ForwardMemory) -> MemoryGuard:
        """Return the guard that admits requests within the limit."""
        return MemoryGuard(
            lambda: min(self.share.limit, self._rank_limit),
            lambda: self.use.bytes_used(),
            forward.bytes_at,
            lambda: self.use.overhead,
        )

    def share_out(
        self, kv_manager: KVManager | NullKVManager, context_tokens: int, forward: ForwardMemory
    ) -> None:
        """Set the budget of kept KV, now and whenever this worker's limit changes.

        Called once, when the model is loaded and no KV is kept. `context_tokens` is the final
        context, at whose end a `forward` takes the most memory.
        """
        if isinstance(kv_manager, NullKVManager):
            return
        model_bytes, overhead = self.use.bytes_used(), self.use.overhead
        slot_bytes = kv_manager.uncached.cold_bytes(context_tokens)
        forward_bytes = forward.bytes_at(context_tokens)
        rank_limit = self._rank.limit(model_bytes)

        def share_out() -> None:
            limit = min(self.share.limit, rank_limit)
            room = divide_room(limit, model_bytes, slot_bytes, forward_bytes, overhead)
            kv_manager.share_out(self._kept_bytes(room), room.idle_bytes)

        self._share_out_again = share_out
        share_out()

    def _kept_bytes(self, room: KVRoom) -> int:
        """Return the budget of kept KV: by setting, or else from `room`.

        A device without a recommended limit is a CPU, which shares its memory with all programs.
        """
        settings = self._settings
        if settings.cache_ram_budget_mb:
            return settings.cache_ram_budget_mb * MB
        if mlx_memory.recommended_bytes() is None:
            unknown = CACHE_RAM_MB_UNKNOWN * MB // max(1, settings.workers)
            return min(room.kept_bytes, unknown)
        return room.kept_bytes

    def measure(self) -> None:
        """Every MEASURE_S, measure this process and read the other workers' claims."""
        now = time.monotonic()
        if now - self._measured_at < MEASURE_S:
            return
        self._measured_at = now
        self.use.measure()
        self._rank_limit = self._rank.limit(self.use.bytes_used())
        before = self.share.limit
        self.share.refresh()
        if self.share.limit != before:
            self._share_out_again()

    def report(self) -> dict[str, int]:
        """Return for /v1/cache the bytes of the process, in total and without MLX's arrays.

        "encoders_bytes" are left free for the process of the embedding and rerank models.
        """
        return {
            "process_bytes": self.use.process_bytes,
            "beside_arrays_bytes": self.use.beside_bytes,
            "encoders_bytes": self.encoders_bytes,
        }


def relief_of(kv_manager: KVManager | NullKVManager) -> PressureRelief:
    """Return the relief that releases kept KV while the system is short of memory."""
    if isinstance(kv_manager, NullKVManager):
        return PressureRelief(level=system_pressure)

    def kept_bytes() -> int:
        return max(0, kv_manager.store.budget.bytes_used - kv_manager.pins.nbytes)

    return PressureRelief(kv_manager, kept_bytes, system_pressure)


def fitting_tokens(
    longest: int, room: int, slot_bytes: Callable[[int], int], forward: ForwardMemory
) -> int:
    """Return the longest context, of at most `longest` tokens, that fits into `room` bytes.

    `slot_bytes` maps a number of tokens to the bytes of their KV. More tokens never take less.
    """
    lengths = range(longest + 1)
    above = bisect.bisect(lengths, room, key=lambda n: slot_bytes(n) + forward.bytes_at(n))
    return max(0, above - 1)
