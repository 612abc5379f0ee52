"""Decides how much memory MLX may take, shares it among workers, and wires the weights.

Wired memory is never swapped, and the GPU reaches it without delay. That is good for weights.
Buffers that are wired and freed again have made macOS panic (mlx's issue 3186), and memory of a
killed process may stay wired until the machine restarts.
Owner: the inference thread.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import mlx.core as mx
import psutil

from hearth.shared.errors import StartError
from hearth.shared.machine import physical_bytes
from hearth.shared.models.local_models import files_like
from hearth.shared.private_files import read_small_file
from hearth.shared.settings import Settings
from hearth.shared.worker_files import WEIGHTS_SUFFIX, weights_path

MB: Final = 1024 * 1024
GB: Final = 1024 * MB
# Constants of MLX's allocator on Apple Silicon.
PAGE_BYTES: Final = 16_384
HEAP_BYTES: Final = MB
HEAP_BELOW_BYTES: Final = 256
_IPC: Final = "ipc://"
_LOCK_TRIES: Final = 50
_LOCK_WAIT_S: Final = 0.001
_BYTES_MAX: Final = 64
RESERVE_BYTES_MAX: Final = 8 * GB  # memory left to all other programs
RESERVE_SHARE: Final = 4  # a small machine's reserve is its memory divided by this


def memory_limit(settings: Settings) -> int:
    """Return how many bytes this machine's workers may take together.

    The limit is MEMORY_LIMIT_MB. By default it is what the device recommends, or less if the
    system's reserve needs more.
    """
    if settings.memory_limit_mb:
        return settings.memory_limit_mb * MB
    return default_limit(recommended_bytes(), machine_bytes())


def default_limit(recommended: int | None, machine: int) -> int:
    """Return the limit of a machine with `machine` bytes, whose device may recommend a limit.

    A Mac swaps beyond its GPU's recommended working set. A Mac of 16 to 32 GB swaps at that limit
    too when an editor runs, so a reserve is left.
    """
    reserve = min(RESERVE_BYTES_MAX, machine // RESERVE_SHARE)
    return machine - reserve if recommended is None else min(recommended, machine - reserve)


def working_bytes(limit: int) -> int:
    """Return the part of a limit that is kept for Python's objects and a short prompt's forward."""
    return min(limit // 20, GB)


def machine_bytes() -> int:
    """Return the bytes of memory that MLX computes in: a GPU's own, or the machine's.

    A Mac reports `memory_size`, CUDA `total_memory`, and a CPU neither.
    """
    info: Any = mx.device_info()
    return int(info.get("memory_size") or info.get("total_memory") or physical_bytes())


def recommended_bytes() -> int | None:
    """Return the device's recommended maximum of bytes; None without one."""
    size: Any = mx.device_info().get("max_recommended_working_set_size")
    return None if size is None else int(size)


def set_memory_limit(limit: int) -> None:
    """Set MLX's memory limit. Near the limit MLX frees the buffers that it keeps for new arrays."""
    mx.set_memory_limit(limit)


def wire(nbytes: int) -> None:
    """Set MLX's limit of wired bytes; existing buffers are wired first. No forward may be running.

    MLX wires each new buffer that fits (mlx/backend/metal/resident.cpp). If the limit is exactly
    the weights' bytes, no KV is wired. A device without a recommended limit wires nothing.
    """
    recommended = recommended_bytes()
    if recommended is None:
        return
    assert nbytes >= 0, nbytes
    mx.synchronize()
    mx.set_wired_limit(min(nbytes, recommended))


def wire_loaded(sizes: Iterable[int]) -> None:
    """Wire exactly the weights that are in memory. Called when the whole model is loaded.

    `sizes` has the bytes of each weight. The sizes of the files are too large: arrays take a
    little less, and KV would be wired in the difference. Of an array smaller than a page MLX counts
    the bytes and wires the page; the smallest arrays lie in a heap, which is wired too.
    Source: mlx/backend/metal/allocator.cpp.
    """
    if recommended_bytes() is not None:
        mx.clear_cache()
        small = [size for size in sizes if size < PAGE_BYTES]
        alone = sum(PAGE_BYTES - size for size in small if size >= HEAP_BELOW_BYTES)
        counted = sum(size for size in small if size < HEAP_BELOW_BYTES)
        wire(int(mx.get_active_memory()) + HEAP_BYTES + alone - counted)


def unwire() -> None:
    """Unwire all memory. Called before the process ends: otherwise macOS may leave it wired."""
    wire(0)


def return_freed() -> None:
    """Free MLX's unused buffers if they take more than the limit's `working_bytes`.

    MLX keeps the buffers of freed arrays for the next forward. A small model's buffers fit into
    the part that is kept free; a large model's take gigabytes that other programs need. Called
    between forwards, so that a forward reuses its own buffers.
    """
    if mx.get_cache_memory() > working_bytes(mx.get_memory_limit()):
        mx.clear_cache()


def dense_bytes_max(total: int, workers: int, others: int = 0) -> int:
    """Return how many bytes a dense model may take: this worker's share of half the free memory.

    The weights of other workers, `others`, count as free, so that each worker decides as the first
    one did. Free memory is never more than the `total` of all workers. If the other workers' models
    are large, the limit is half of what they leave, which `refuse_heavy` accepts.
    """
    free = min(total, psutil.virtual_memory().available + others)
    return min(int(free) // max(1, workers), max(0, total - others)) // 2


def held_bytes() -> int:
    """Return the bytes that MLX's arrays take now."""
    return int(mx.get_active_memory())


def weight_bytes(directory: Path) -> int:
    """Return the bytes of a checkpoint's weight files."""
    return sum(path.stat().st_size for path in files_like(directory, ["*.safetensors"]))


def refuse_heavy(nbytes: int, source: str, limit: int, others: int = 0, encoders: int = 0) -> None:
    """Raise StartError if a checkpoint's weights of `nbytes` do not fit.

    `others` are the bytes of `limit` that other workers' weights take. `encoders` are bytes outside
    `limit` that the models for embeddings and reranking take; only the error names these bytes.
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


class _Claim(NamedTuple):
    weight_bytes: int
    limit: int


class MemoryShare:
    """One worker's limit: its own weights, and an equal share of the bytes without weights.

    Each worker writes a file beside its socket with the bytes of its weights and its limit, and
    reads the other workers' files. The server's directory is private to its user, and the
    supervisor removes the files.
    Invariant: the limits of all workers together are at most `total`. A worker that needs more
    waits until the others have lowered their limits; each refreshes its own from time to time.
    Owner: the inference thread.
    """

    def __init__(
        self, endpoint: str, total: int, workers: int, hold: Callable[[int], None]
    ) -> None:
        """`hold` is called with each new limit, before the other workers can read it."""
        self._path = weights_path(Path(endpoint.removeprefix(_IPC)))
        self._workers = workers
        self.total = total  # bytes that all workers may take
        self.own_bytes = 0  # bytes of this worker's weights
        self._others: list[_Claim] = []
        self._hold = hold
        self._announced = -1  # last argument of `hold`
        self.limit = self._fair(0)  # bytes that this worker may take, weights included

    @property
    def others_bytes(self) -> int:
        """The bytes of the other workers' weights."""
        return sum(claim.weight_bytes for claim in self._others)

    @property
    def expected_limit(self) -> int:
        """The limit once all workers have loaded.

        Workers without weights are expected to load the same model as this one, if that fits.
        """
        others = self.others_bytes + (self._workers - 1 - len(self._others)) * self.own_bytes
        return self._fair(others) if self.own_bytes + others <= self.total else self.limit

    def claim(self, nbytes: int) -> None:
        """Announce the bytes of this worker's weights, before the weights are read."""
        assert nbytes >= 0, nbytes
        self.own_bytes = nbytes
        self.refresh()

    def refresh(self) -> None:
        """Read the other workers' claims, and update and announce this worker's limit."""
        if self._workers == 1:
            self._decide()
            return
        with self._lock():
            self.read_others()
            self._decide()
            # Written in place, which works on a full disk.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{self.own_bytes} {self.limit}")

    def read_others(self) -> None:
        """Read the other workers' claims, and announce nothing."""
        if self._workers > 1:
            files = self._path.parent.glob(f"*{WEIGHTS_SUFFIX}")
            claims = (_claim(path) for path in files if path != self._path)
            self._others = [claim for claim in claims if claim is not None]

    def release(self) -> None:
        """Withdraw the claim: the weights are gone, or are not loaded."""
        self.own_bytes = 0
        if self._workers > 1:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _decide(self) -> None:
        taken = sum(claim.limit for claim in self._others)
        self.limit = max(0, min(self._fair(self.others_bytes), self.total - taken))
        if self.limit != self._announced:
            self._announced = self.limit
            self._hold(self.limit)

    def _fair(self, others: int) -> int:
        return fair_limit(self.total, self.own_bytes, others, self._workers)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the workers' lock for microseconds, so that no two claim the same bytes.

        The lock is on the directory, and ends with the process that holds it. If a stopped process
        holds it, the others go on without it after a short time.
        """
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for _ in range(_LOCK_TRIES):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_LOCK_WAIT_S)
            yield
        finally:
            os.close(descriptor)


def fair_limit(total: int, own: int, others: int, workers: int) -> int:
    """Return one worker's limit: its weights, and an equal share of what all weights leave.

    `own` and `others` are the bytes of this worker's and of the other workers' weights.
    """
    return own + max(0, total - own - others) // workers


def _claim(path: Path) -> _Claim | None:
    """Return the claim in a worker's file; None if the file is gone or not valid."""
    try:
        words = read_small_file(path, _BYTES_MAX).decode("ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    return _Claim(*map(int, words))
