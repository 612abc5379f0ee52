"""Finds how much memory MLX may take on this machine, and which of it is wired.

What is wired stays in memory whatever else needs room, and the GPU reaches it without delay. That
is good for weights. Buffers that come and go in it have made macOS panic (mlx's issue 3186), and a
process that is killed may leave it wired until the machine restarts.
Owner: the inference thread.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import psutil

from hearth.shared.errors import StartError
from hearth.shared.machine import physical_bytes
from hearth.shared.models.local_models import files_like
from hearth.shared.settings import Settings
from hearth.worker.engine.memory_reserve import default_limit, working_bytes

MB: Final = 1024 * 1024
GB: Final = 1024 * MB
# Of MLX's allocator on Apple Silicon.
PAGE_BYTES: Final = 16_384
HEAP_BYTES: Final = MB
HEAP_BELOW_BYTES: Final = 256


def memory_limit(settings: Settings) -> int:
    """Return how many bytes this machine's workers may take together: MEMORY_LIMIT_MB, or a share.

    By default it is what the device recommends, and no more than leaves the system its reserve.
    """
    if settings.memory_limit_mb:
        return settings.memory_limit_mb * MB
    return default_limit(recommended_bytes(), machine_bytes())


def machine_bytes() -> int:
    """Return the memory that MLX's device computes in: the machine's, but for a GPU with its own.

    A Mac's device tells `memory_size`, CUDA's `total_memory`, a CPU neither.
    """
    told: Any = mx.device_info()
    size = told.get("memory_size") or told.get("total_memory")
    return int(size or physical_bytes())


def recommended_bytes() -> int | None:
    """Return how many bytes of memory the GPU should use at most; None where it doesn't say."""
    size: Any = mx.device_info().get("max_recommended_working_set_size")
    return None if size is None else int(size)


def hold_memory(limit: int) -> None:
    """Tell MLX its limit: nearing it, MLX gives back what it keeps for arrays to come."""
    mx.set_memory_limit(limit)


def wire(nbytes: int) -> None:
    """Wire so many bytes and no more, of what MLX holds by now first. Nothing may be computing.

    MLX wires each buffer as it comes, as long as it fits, so with exactly the weights' bytes there
    is no room for KV (mlx/backend/metal/resident.cpp). A device that recommends nothing wires none.
    """
    recommended = recommended_bytes()
    if recommended is None:
        return
    assert nbytes >= 0, nbytes
    mx.synchronize()
    mx.set_wired_limit(min(nbytes, recommended))


def wire_loaded(sizes: Iterable[int]) -> None:
    """Wire the weights that are in memory now, and no byte more. Called when a model is whole.

    Files are not quite what arrays take, and the difference would be room for KV. `sizes` has the
    bytes of each weight.
    """
    if recommended_bytes() is not None:
        mx.clear_cache()
        wire(int(mx.get_active_memory()) + unpaged_bytes(sizes))


def unpaged_bytes(sizes: Iterable[int]) -> int:
    """Return what wiring arrays of these sizes takes beyond what MLX counts for them.

    MLX counts an array below a page as it is and wires the page; the smallest lie together in a
    heap, which is wired too. Source: mlx/backend/metal/allocator.cpp.
    """
    small = [size for size in sizes if size < PAGE_BYTES]
    alone = [PAGE_BYTES - size for size in small if size >= HEAP_BELOW_BYTES]
    return HEAP_BYTES + sum(alone) - sum(size for size in small if size < HEAP_BELOW_BYTES)


def unwire() -> None:
    """Wire nothing any more. Called before the process ends: the system forgets it otherwise."""
    wire(0)


def return_freed() -> None:
    """Give back what MLX keeps of freed arrays, where it is more than the limit leaves for it.

    The next forward of the same size takes these buffers again instead of asking the system: a
    small model's fit into what each worker leaves free anyway, a large one's are gigabytes that
    other programs need. Called between forwards, so that within one nothing is given back.
    """
    if mx.get_cache_memory() > working_bytes(mx.get_memory_limit()):
        mx.clear_cache()


def dense_bytes_max(total: int, workers: int, others: int = 0) -> int:
    """Return what the dense form of one model may take: this worker's part of half of what is free.

    Free is what the system says is, and what the other workers' weights take, `others`, so that
    each of them decides as the first one did; but never more than the `total` of all workers.
    Beside larger models of theirs it is half of what these leave, so that `refuse_heavy` takes it.
    """
    free = min(total, psutil.virtual_memory().available + others)
    return min(int(free) // max(1, workers), max(0, total - others)) // 2


def held_bytes() -> int:
    """Return what MLX's arrays take now."""
    return int(mx.get_active_memory())


def weight_bytes(directory: Path) -> int:
    """Return what a checkpoint's weights take, as its files say."""
    return sum(path.stat().st_size for path in files_like(directory, ["*.safetensors"]))


def refuse_heavy(nbytes: int, source: str, limit: int, others: int = 0, encoders: int = 0) -> None:
    """Raise StartError where a checkpoint's weights alone, of `nbytes`, would not fit.

    `others` is what the other workers' weights take of `limit`, `encoders` what is left free
    beside it.
    """
    room = limit - others
    if nbytes <= room - working_bytes(room):
        return
    beside = f" beside the {others / GB:.1f} GB of other workers' models" if others else ""
    if encoders:
        beside += f" beside the {encoders / GB:.1f} GB of EMBEDDING_MODEL and RERANK_MODEL"
    raise StartError(
        f"MODEL_PATH is {source!r}, whose weights are {nbytes / GB:.1f} GB, and the model may "
        f"take {(room - working_bytes(room)) / GB:.1f} GB on this machine{beside}. Use a smaller "
        "model or one of fewer bits, set fewer WORKERS, or raise MEMORY_LIMIT_MB."
    )
