"""Makes the KV manager of a loaded model from the settings and the model's own caches.

This module also makes the functions that sweep old slots and scan the KV directory.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Final

from mlx_lm.models.cache import ArraysCache

from hearth.shared.errors import StartError
from hearth.shared.machine import VISION_REMEDY, has_vision
from hearth.shared.settings import Settings
from hearth.worker.cache.block_hash import ROOT_SCHEMA, PrefixHash, schema_root
from hearth.worker.cache.extent_store import Budget
from hearth.worker.disk.disk_thread import QUEUE_BYTES_MIN
from hearth.worker.disk.open_file_store import open_file_store
from hearth.worker.doctor.checked_machine import chip, loaded_blas
from hearth.worker.engine.compute_dtype import differs_when_decoded
from hearth.worker.engine.decode.batch_split import read_cost
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.model_loader import LoadedModel, backend
from hearth.worker.engine.prefill_lengths import network_of, prefill_lengths
from hearth.worker.engine.weights_identity import PATTERNS, HashMemory, WeightsIdentity
from hearth.worker.kv.kv_manager import KVManager, NullKVManager
from hearth.worker.kv.kv_transfer import IdleMode, KeepRules
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.layer_kinds.kinds import added_versions, kinds_in, probe_tokens
from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
from hearth.worker.kv.quantise_kv import (
    WIDTH_MAX,
    WIDTH_STEP,
    PackedFormat,
    QuantFormat,
    TurboFormat,
)
from hearth.worker.prompt.prefill_cuts import CutRule
from hearth.worker.prompt.template_turn_tokens import turn_marks
from hearth.worker.schedule.memory_guard import MemoryGuard, Watermark
from hearth.worker.schedule.scheduler_config import SchedulerConfig
from hearth.worker.setup.rank_setup import SingleRank

BESIDE_GOAL_S: Final = 0.25  # desired seconds of a prompt's forward while answers are decoded


def cut_rule_of(loaded: LoadedModel, settings: Settings) -> CutRule:
    """Return the cut rule for this model on this chip; PREFILL_CHUNK may set the chunk."""
    lengths = prefill_lengths(loaded)
    return CutRule(
        settings.prefill_chunk or lengths.chunk,
        turn_marks(loaded.tokenizer),
        lengths.gap,
        lengths.step_min,
        lengths.full_to,
    )


def with_goal_beside(
    config: SchedulerConfig, loaded: LoadedModel, settings: Settings
) -> SchedulerConfig:
    """Return the config that shortens prefill forwards to BESIDE_GOAL_S while answers wait.

    Shortened forwards give fast KV, so exact mode keeps whole chunks. On a CPU chunks are short
    already.
    """
    if backend() == "cpu" or is_exact(loaded, settings):
        return config
    tokens_min = prefill_lengths(loaded).beside_min
    return dataclasses.replace(config, beside_goal_s=BESIDE_GOAL_S, beside_tokens_min=tokens_min)


log = logging.getLogger(__name__)

# Fixed values in a root's parts instead of the storage settings: each file names its format.
ROOT_GROUP_SIZE, ROOT_STORE_BITS = 64, "0"


def make_kv_manager(
    engine: Engine,
    loaded: LoadedModel,
    settings: Settings,
    cut_rule: CutRule,
    rank: SingleRank | None = None,
) -> KVManager | NullKVManager:
    """Return a KVManager, or a NullKVManager with a warning if the caches are unknown.

    The manager keeps nothing until `WorkerMemory.share_out` sets a budget.

    Raises:
        StartError: mlx-lm cannot do KV_BITS or KV_QUANT_SCHEME with this model's caches,
            KV_CACHE_DIR belongs to another user, or the layers of the ranks do not fit together.
    """
    rank = rank or SingleRank()
    running = _running_format(engine, settings)
    try:
        layers = rank.layer_map(engine.probe(probe_tokens(engine.new_cache())))
    except UnknownCache as unknown:
        log.warning("no KV is reused: the model keeps %s, which cannot be restored", unknown)
        return NullKVManager(engine.new_cache)
    engine.decoder.cost = read_cost(
        network_of(loaded),
        loaded.config,
        layers.row_cost(running)[0],
        layers.layout.window,
        layers.window_bytes(1),
    )
    exact = is_exact(loaded, settings)
    store_format, store_ignored = _store_format(layers, settings, exact)
    if store_ignored:
        log.warning("CACHE_STORE_BITS is ignored: %s", store_ignored)
    rules = KeepRules(
        slots_max=live_slots_max(settings),
        chunk=cut_rule.chunk,
        is_exact=exact,
        cut_label=cut_rule.label,
        ttl_s=settings.prompt_cache_ttl_seconds,
        session_idle_s=settings.prompt_cache_session_max_idle_seconds,
        store_format=store_format,
        store_ignored=store_ignored,
        running_format=running,
        running_from=settings.quantized_kv_start,
        idle_prefill=IdleMode(settings.idle_prefill),
        api_keys=max(1, len(settings.api_keys)),
    )
    root = cache_root(loaded, settings)
    # The disk thread's queue has room for two of the largest writes.
    window = layers.window_bytes(min(cut_rule.chunk, layers.layout.window))
    largest = max(cut_rule.chunk * layers.row_bytes, layers.state_bytes, window)
    queue_bytes = max(QUEUE_BYTES_MIN, 2 * largest)
    file_store = open_file_store(root, settings, cut_rule.label, rank.ranks_here)
    disk_thread = rank.disk_thread(file_store, queue_bytes) if file_store is not None else None
    return KVManager(root, layers, engine.new_cache, Budget(0), rules, disk_thread)


def is_exact(loaded: LoadedModel, settings: Settings) -> bool:
    """Return whether only canonical KV is reused.

    By default this is so if the reuse of decoded KV visibly changes logits, which depends on the
    kinds of the model's layers, and on its modules (worker/engine/compute_dtype.py). Findings of
    the doctor may also cause this. Some kinds allow nothing else.
    """
    kinds = kinds_in(loaded.facts.cache_layout)
    if any(kind.is_prefill_only for kind in kinds):
        return True
    if settings.cache_exact != "auto":
        return settings.cache_exact == "true"
    keeps_states = ArraysCache.__name__ in loaded.facts.cache_layout
    chooses_tokens = any(kind.chooses_tokens for kind in kinds)
    return chooses_tokens or differs_when_decoded(loaded.model, keeps_states)


def cache_root(loaded: LoadedModel, settings: Settings) -> PrefixHash:
    """Return the hash of the empty prefix, made of everything that decides the KV of given tokens.

    Included are the model's identity with the whole config.json (rope, quantisation and so on), and
    what decides the last bits: the compute dtype, the device, the BLAS of a CPU, the ranks, and the
    packages that added layer kinds.
    The storage format and the prefill cuts are not included, because each file names its own.
    """
    facts = loaded.facts
    blas = loaded_blas() if facts.backend == "cpu" else ""
    group_size = settings.kv_group_size if settings.kv_bits else ROOT_GROUP_SIZE
    parts = [
        str(ROOT_SCHEMA),
        facts.path,
        *loaded.identity.parts(),
        facts.cache_layout,
        facts.backend,
        chip(),
        str(settings.kv_bits),
        str(group_size),
        str(settings.quantized_kv_start),
        ROOT_STORE_BITS,
        version("mlx"),
        version("mlx-lm"),
        *([version("mlx-vlm")] if loaded.is_of_mlx_vlm else []),
        *added_versions(facts.cache_layout),
        f"dtype {loaded.dtype.form}",
        *([f"BLAS {blas}"] if blas else []),
        *([f"{settings.ranks} ranks, {settings.rank_split}"] if settings.ranks > 1 else []),
    ]
    return schema_root(parts)


def identify(
    settings: Settings,
    is_over: Callable[[], bool],
    directory: Path,
    patterns: Iterable[str] = PATTERNS,
) -> WeightsIdentity:
    """Return the identity of the weights in `directory`, and begin to hash the weights.

    Hashes are remembered on disk. If a worker writes no KV to disk, no file is hashed, unless ranks
    have to compare their weights.
    """
    is_kept = settings.max_kv_size_gb != 0
    memory = HashMemory(settings.kv_cache_dir) if is_kept else None
    is_hashed = is_kept or settings.ranks > 1
    return WeightsIdentity(directory, memory, is_hashed, is_over, patterns)


def _store_format(
    layers: LayerMap, settings: Settings, exact: bool
) -> tuple[PackedFormat | None, str]:
    """Return the format of stored KV, and why CACHE_STORE_BITS has no effect, if so.

    Raises:
        StartError: TurboQuant is set, but is not installed or cannot pack any layer.
    """
    bits = settings.cache_store_bits
    if not bits:
        return None, ""
    if exact:
        return None, "this model reuses exact KV only (CACHE_EXACT)"
    widths = ", ".join(map(str, layers.row_widths)) or "none"
    if settings.kv_quant_scheme == "turboquant":
        return _turbo_format(layers, bits, widths), ""
    form = QuantFormat(int(bits), settings.kv_group_size)
    if layers.packs(form):
        return form, ""
    reason = f"rows of {widths} elements are no multiples of KV_GROUP_SIZE={form.group_size}"
    return None, reason


def _turbo_format(layers: LayerMap, bits: float, widths: str) -> TurboFormat:
    asked = f"KV_QUANT_SCHEME is turboquant and CACHE_STORE_BITS is {bits:g}"
    if not has_vision():
        raise StartError(
            f"{asked}, and mlx-vlm, which packs so, is not installed: {VISION_REMEDY}. Or set "
            "KV_QUANT_SCHEME=uniform and CACHE_STORE_BITS=4."
        )
    for dtype in layers.row_dtypes:
        form = TurboFormat(bits, dtype)
        if layers.packs(form):
            return form
    raise StartError(
        f"{asked}, and no layer of this model can be packed so: their rows have {widths} elements, "
        f"and TurboQuant takes multiples of {WIDTH_STEP} up to {WIDTH_MAX}. Set "
        "KV_QUANT_SCHEME=uniform, or CACHE_STORE_BITS=off."
    )


def _running_format(engine: Engine, settings: Settings) -> QuantFormat | None:
    if not settings.kv_bits:
        return None
    form = QuantFormat(settings.kv_bits, settings.kv_group_size)
    reason = engine.why_not_quantised(form.bits, form.group_size)
    if reason is not None:
        raise StartError(
            f"KV_BITS is {form.bits}, and mlx-lm cannot quantise this model's KV: {reason}. "
            "Set KV_BITS=off; CACHE_STORE_BITS quantises what is kept."
        )
    return form


BATCHED: Final = 32  # default if sequences share forwards; more would slow each other
LONE: Final = 4  # default if each sequence has its own forwards; more would end no earlier


def running_max(settings: Settings, is_batched: bool) -> int:
    """Return how many requests may compute at once; `is_batched`: requests share forwards.

    Each running request has a live cache, so LIVE_SLOTS_MAX limits the requests too.
    """
    wanted = settings.max_concurrent_requests or (BATCHED if is_batched else LONE)
    return min(wanted, settings.live_slots_max or wanted)


def live_slots_max(settings: Settings) -> int:
    """Return how many live caches may exist, by default one per running request."""
    return settings.live_slots_max or max(BATCHED, settings.max_concurrent_requests)


# ---------------------------------------------------------------- beside requests


def sweep_of(kv_manager: KVManager | NullKVManager, memory: MemoryGuard) -> Callable[[], bool]:
    """Return a function that releases old slots and warns if a budget is nearly used up."""
    watermarks = [Watermark("Memory", "MEMORY_LIMIT_MB", memory.used, memory.limit)]
    if isinstance(kv_manager, KVManager):
        budget = kv_manager.store.budget
        watermarks.append(
            Watermark(
                "Kept KV",
                "CACHE_RAM_BUDGET_MB",
                lambda: budget.bytes_used,
                lambda: budget.bytes_max,
            )
        )

    def sweep() -> bool:
        for watermark in watermarks:
            watermark.check()
        return kv_manager.sweep()

    return sweep


def disk_scan_of(
    kv_manager: KVManager | NullKVManager | None, workers: int
) -> Callable[[], threading.Event | None]:
    """Return a function that starts a scan for KV files of other workers.

    An event marks the end of the scan. `workers` is the number of this server's workers, which
    share the directory.
    """
    if not isinstance(kv_manager, KVManager) or kv_manager.disk is None:
        return lambda: None
    kv_manager.disk.thread.file_store.is_shared |= workers > 1
    return kv_manager.disk.thread.refresh
