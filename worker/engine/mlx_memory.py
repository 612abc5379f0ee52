"""Finds how much memory MLX may take on this machine, each worker of it, and which is wired.

What is wired stays in memory whatever else needs room, and the GPU reaches it without delay. That
is good for weights. Buffers that come and go in it have made macOS panic (mlx's issue 3186), and a
process that is killed may leave it wired until the machine restarts.
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
# Of MLX's allocator on Apple Silicon.
PAGE_BYTES: Final = 16_384
HEAP_BYTES: Final = MB
HEAP_BELOW_BYTES: Final = 256
_IPC: Final = "ipc://"
_LOCK_TRIES: Final = 50
_LOCK_WAIT_S: Final = 0.001
_BYTES_MAX: Final = 64
RESERVE_BYTES_MAX: Final = 8 * GB  # of the machine's memory, left to all else that runs on it
RESERVE_SHARE: Final = 4  # a small machine keeps this part of its memory: 1 / 4


def memory_limit(settings: Settings) -> int:
    """Return how many bytes this machine's workers may take together: MEMORY_LIMIT_MB, or a share.

    By default it is what the device recommends, and no more than leaves the system its reserve.
    """
    if settings.memory_limit_mb:
        return settings.memory_limit_mb * MB
    return default_limit(recommended_bytes(), machine_bytes())


def default_limit(recommended: int | None, machine: int) -> int:
    """Return the limit of a machine of so much memory, whose device recommends so much or nothing.

    Beyond a GPU's recommended working set a Mac swaps; at it, with the system and an editor beside,
    one of 16 to 32 GB does too.
    """
    reserve = min(RESERVE_BYTES_MAX, machine // RESERVE_SHARE)
    return machine - reserve if recommended is None else min(recommended, machine - reserve)


def working_bytes(limit: int) -> int:
    """Return what of a limit is left for Python's objects and a short prompt's forward."""
    return min(limit // 20, GB)


def machine_bytes() -> int:
    """Return the memory that MLX's device computes in: the machine's, but for a GPU with its own.

    A Mac's device tells `memory_size`, CUDA's `total_memory`, a CPU neither.
    """
    told: Any = mx.device_info()
    return int(told.get("memory_size") or told.get("total_memory") or physical_bytes())


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
    bytes of each weight. MLX counts an array below a page as it is and wires the page; the smallest
    lie together in a heap, which is wired too. Source: mlx/backend/metal/allocator.cpp.
    """
    if recommended_bytes() is not None:
        mx.clear_cache()
        small = [size for size in sizes if size < PAGE_BYTES]
        alone = sum(PAGE_BYTES - size for size in small if size >= HEAP_BELOW_BYTES)
        counted = sum(size for size in small if size < HEAP_BELOW_BYTES)
        wire(int(mx.get_active_memory()) + HEAP_BYTES + alone - counted)


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


class _Claim(NamedTuple):
    weight_bytes: int
    limit: int


class MemoryShare:
    """One worker's part of `total` bytes: its own weights, and an equal part of what none takes.

    Each worker leaves, in a file beside its socket, the bytes of its weights and the limit that it
    holds itself to, and reads those of the others. The server's directory is private to its user;
    its supervisor removes the files.
    Invariant: the limits of all workers are never more than `total` together. One that needs more
    waits until the others, which look every now and then, hold themselves to less.
    Owner: the inference thread.
    """

    def __init__(
        self, endpoint: str, total: int, workers: int, hold: Callable[[int], None]
    ) -> None:
        """`hold` is told each new limit, before the other workers can see it."""
        self._path = weights_path(Path(endpoint.removeprefix(_IPC)))
        self._workers = workers
        self.total = total  # bytes that all workers may take
        self.own_bytes = 0  # of weights
        self._others: list[_Claim] = []
        self._hold = hold
        self._told = -1  # the limit that `hold` was told last
        self.limit = self._fair(0)  # bytes that this worker may take, weights included

    @property
    def others_bytes(self) -> int:
        """What the other workers' weights take."""
        return sum(claim.weight_bytes for claim in self._others)

    @property
    def expected_limit(self) -> int:
        """The limit once all workers have loaded: those that have not, this one's model too.

        Where that does not fit, they will not.
        """
        others = self.others_bytes + (self._workers - 1 - len(self._others)) * self.own_bytes
        return self._fair(others) if self.own_bytes + others <= self.total else self.limit

    def claim(self, nbytes: int) -> None:
        """Tell the others what this worker's weights take, before they are read."""
        assert nbytes >= 0, nbytes
        self.own_bytes = nbytes
        self.refresh()

    def refresh(self) -> None:
        """Read what the other workers hold, and tell them what this one may."""
        if self._workers == 1:
            self._decide()
            return
        with self._lock():
            self.look()
            self._decide()
            # In place: it takes no room of a disk that is full.
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{self.own_bytes} {self.limit}")

    def look(self) -> None:
        """Read what the other workers hold, and tell them nothing."""
        if self._workers > 1:
            files = self._path.parent.glob(f"*{WEIGHTS_SUFFIX}")
            found = (_claim(path) for path in files if path != self._path)
            self._others = [claim for claim in found if claim is not None]

    def give_up(self) -> None:
        """Claim nothing any more: the weights are gone, or do not come."""
        self.own_bytes = 0
        if self._workers > 1:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _decide(self) -> None:
        held = sum(claim.limit for claim in self._others)
        self.limit = max(0, min(self._fair(self.others_bytes), self.total - held))
        if self.limit != self._told:
            self._told = self.limit
            self._hold(self.limit)

    def _fair(self, others: int) -> int:
        return fair_limit(self.total, self.own_bytes, others, self._workers)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the workers' lock, for microseconds: two that look at once would both take a rest.

        It is on the directory, and ends with the process that holds it. One that was stopped amid
        its look holds up nobody for long.
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
    """Return the limit of one of so many workers: its weights, and an equal part of what is left.

    `own` and `others` are the bytes of its weights and of theirs.
    """
    return own + max(0, total - own - others) // workers


def _claim(path: Path) -> _Claim | None:
    """Return what one file says; None where it is gone, or says nothing."""
    try:
        words = read_small_file(path, _BYTES_MAX).decode("ascii").split()
    except (OSError, UnicodeDecodeError):
        return None
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return None
    return _Claim(*map(int, words))
