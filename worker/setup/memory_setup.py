"""Holds a worker's memory to its part of the machine's: while its model loads, serves, and ends.

EMBEDDING_MODEL and RERANK_MODEL are in a process of their own, which takes memory only while it is
used. What it can take is kept free all the time: a worker that had it would have to give KV back
just as a document is read.
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


LIVE_SHARE_MIN: Final = 4  # requests have 1 / 4 of the room at least, so that several run at once
LIVE_SHARE_MAX: Final = 2  # and 1 / 2 at most; beyond that kept KV gives way when they need it
IDLE_SHARE: Final = 2  # of that, 1 / 2 may stay with live caches that no request uses


@dataclass(frozen=True, slots=True)
class KVRoom:
    """The parts of the room. What they leave of it is free for requests that begin."""

    kept_bytes: int  # kept KV may take
    idle_bytes: int  # live caches that no request uses may take


def divide_room(
    limit: int, model_bytes: int, slot_bytes: int, forward_bytes: int, overhead: float = 0.0
) -> KVRoom:
    """Return the default parts of kept KV and of idle live caches, in bytes of arrays.

    `limit` is what the worker may take, `model_bytes` what it takes without any KV, `slot_bytes`
    the KV of one sequence as long as the told context, `forward_bytes` what a forward at that
    depth takes, and `overhead` what the system counts for a byte of arrays beyond it.

    Requests have what one sequence of the told context takes, within their bounds: beside kept KV
    that is full, it is read and nothing is evicted for it. Where it takes more than half of the
    room, as it does where memory decides how long the context is, kept KV gives way to it.
    """
    assert min(limit, model_bytes, slot_bytes, forward_bytes) >= 0 and overhead >= 0
    room = int(max(0, limit - model_bytes - working_bytes(limit)) / (1 + overhead))
    wanted = slot_bytes + int(forward_bytes / (1 + overhead))
    live = min(max(wanted, room // LIVE_SHARE_MIN), room // LIVE_SHARE_MAX)
    return KVRoom(room - live, live // IDLE_SHARE)


MEASURE_S: Final = 0.5  # between two looks at the process and at the other workers
CONTEXT_TOKENS_MIN: Final = 256
GB: Final = mlx_memory.GB

log = logging.getLogger(__name__)


class WorkerMemory:
    """Knows what this worker may take and what it takes. Owner: the inference thread."""

    def __init__(self, settings: Settings, endpoint: str, rank: SingleRank | None = None) -> None:
        self._settings = settings
        self._rank = rank or SingleRank()
        self._rank_limit = UNLIMITED  # as of the last look
        self.encoders_bytes = encoders_bytes(settings)
        total = workers_limit(settings) // self._rank.ranks_here
        if self.encoders_bytes:
            log.info(
                "%.1f GB are left free for EMBEDDING_MODEL and RERANK_MODEL, %.1f GB are the "
                "workers'",
                *(self.encoders_bytes / GB, total / GB),
            )
        self.share = MemoryShare(endpoint, total, settings.workers, mlx_memory.hold_memory)
        self.use = MemoryUse()
        self._measured_at = time.monotonic()
        # Called when this worker's limit has moved.
        self._share_out_again: Callable[[], None] = lambda: None

    def admit(self, nbytes: int) -> None:
        """Make ready for weights of `nbytes`, before they are read.

        Raises:
            StartError: they do not fit, beside those of other workers.
        """
        share, settings = self.share, self._settings
        share.claim(nbytes)
        try:
            mlx_memory.refuse_heavy(
                *(nbytes, settings.model_path, share.total, share.others_bytes),
                encoders=self.encoders_bytes,
            )
        except Exception:
            share.release()
            raise
        mlx_memory.wire(nbytes)

    def dense_bytes_max(self) -> int:
        """Return what the dense form of a model may take on a CPU."""
        share = self.share
        share.read_others()
        return mlx_memory.dense_bytes_max(share.total, self._settings.workers, share.others_bytes)

    def loaded(self, sizes: Iterable[int]) -> None:
        """Note that the model is whole, with all that encodes images. Nothing computes yet.

        `sizes` has the bytes of each of its weights.
        """
        mlx_memory.wire_loaded(sizes)
        self.use.measure()

    def fit(
        self, loaded: LoadedModel, slot_bytes: Callable[[int], int], forward: ForwardMemory
    ) -> LoadedModel:
        """Return the model with the context that fits beside its weights, for one sequence alone.

        `slot_bytes` gives the bytes of the KV of so many tokens.

        Raises:
            StartError: hardly anything fits.
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
            more = "more RANKS" if ranks > 1 else "KV_BITS=8"  # which several ranks cannot have
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
        """Return what admits requests within the limit."""
        return MemoryGuard(
            lambda: min(self.share.limit, self._rank_limit),
            lambda: self.use.bytes_used(),
            forward.bytes_at,
            lambda: self.use.overhead,
        )

    def share_out(
        self, kv_manager: KVManager | NullKVManager, context_tokens: int, forward: ForwardMemory
    ) -> None:
        """Tell how much KV may be kept, now and whenever this worker's limit moves.

        Called once, when the model is whole and nothing is kept. `context_tokens` is the context
        that is told, which `forward` takes most at.
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
        """Return what kept KV may take: as the setting says, else its part of the room.

        A device that recommends nothing is a CPU, which shares its memory with everything else.
        """
        settings = self._settings
        if settings.cache_ram_budget_mb:
            return settings.cache_ram_budget_mb * MB
        if mlx_memory.recommended_bytes() is None:
            unknown = CACHE_RAM_MB_UNKNOWN * MB // max(1, settings.workers)
            return min(room.kept_bytes, unknown)
        return room.kept_bytes

    def measure(self) -> None:
        """Look at the process and at the other workers, where the last look is some time ago."""
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
        """Return for /v1/cache what the process takes, and what of it is not MLX's.

        And what is left free for the models that embed and rank, in a process of their own.
        """
        return {
            "process_bytes": self.use.process_bytes,
            "beside_arrays_bytes": self.use.beside_bytes,
            "encoders_bytes": self.encoders_bytes,
        }


def relief_of(kv_manager: KVManager | NullKVManager) -> PressureRelief:
    """Return what gives kept KV back while the system is short of memory."""
    if isinstance(kv_manager, NullKVManager):
        return PressureRelief(level=system_pressure)

    def kept_bytes() -> int:
        return max(0, kv_manager.store.budget.bytes_used - kv_manager.pins.nbytes)

    return PressureRelief(kv_manager, kept_bytes, system_pressure)


def fitting_tokens(
    longest: int, room: int, slot_bytes: Callable[[int], int], forward: ForwardMemory
) -> int:
    """Return the longest context, of at most `longest` tokens, that `room` bytes hold alone.

    `slot_bytes` gives the bytes of the KV of so many tokens; it and `forward` never fall.
    """
    lengths = range(longest + 1)
    above = bisect.bisect(lengths, room, key=lambda n: slot_bytes(n) + forward.bytes_at(n))
    return max(0, above - 1)
