"""Makes what a follower needs to do as it is told: its part of the model, its memory.

Owner: the thread that computes.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx

from hearth.shared.settings_from_env import Settings
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_store import FileStore
from hearth.worker.engine import mlx_memory
from hearth.worker.engine.engine import leave_device
from hearth.worker.engine.footprint import MemoryUse
from hearth.worker.engine.model_loader import LoadedModel, load_model, weights_of
from hearth.worker.ranks.agreed_tokens import Sum, sum_over
from hearth.worker.ranks.disk.open_followed_store import open_followed_store
from hearth.worker.ranks.follower import Follower
from hearth.worker.ranks.loading.sharded_model import Sharded
from hearth.worker.ranks.rank_link import FollowerLink
from hearth.worker.setup.encoder_memory import workers_limit
from hearth.worker.setup.kv_setup import identify

MEASURE_S: Final = 0.5

log = logging.getLogger(__name__)


class FollowerMemory:
    """Holds a follower to its part of its machine, and tells rank 0 what is left of that."""

    def __init__(self, settings: Settings, link: FollowerLink) -> None:
        self._settings = settings
        self._link = link
        self._use = MemoryUse()
        self._measured_at = 0.0
        self._limit = workers_limit(settings)

    def share(self, ranks_here: int) -> None:
        """So many ranks of each worker are on this machine, and have equal parts of its memory."""
        parts = ranks_here * max(1, self._settings.workers)
        self._limit = workers_limit(self._settings) // parts
        mlx_memory.hold_memory(self._limit)

    def admit(self, nbytes: int) -> None:
        """Make ready for weights of `nbytes`. Raises: StartError, where they do not fit."""
        mlx_memory.refuse_heavy(nbytes, self._settings.model_path, self._limit)
        mlx_memory.wire(nbytes)

    def loaded(self, model: LoadedModel) -> None:
        mlx_memory.wire_loaded(one.nbytes for one in weights_of(model))
        self.measure()

    def measure(self, *, is_due: bool = False) -> None:
        """Look at the process, where the last look is some time ago; rank 0 is told later."""
        now = time.monotonic()
        if is_due or now - self._measured_at >= MEASURE_S:
            self._measured_at = now
            self._use.measure()
            self._link.set_room(*self.room())

    def room(self) -> tuple[int, int]:
        """Return the bytes that this rank may take, and those that it takes."""
        return self._limit, self._use.bytes_used()


def make_follower(
    link: FollowerLink,
    group: mx.distributed.Group,
    settings: Settings,
    summing: Callable[[mx.distributed.Group], Sum] = sum_over,
) -> Follower:
    """Return what does as rank 0 tells by `link`, with this rank's part of the model."""
    memory = FollowerMemory(settings, link)

    def load(dtype: str, ranks_here: Sequence[int]) -> LoadedModel:
        """Load this rank's part, to be computed in `dtype`, whatever is found of it here."""
        memory.share(ranks_here[link.rank])
        part = Sharded(group, settings.rank_split)
        name = functools.partial(identify, settings, lambda: False)
        meant = dataclasses.replace(settings, dtype=dtype)
        loaded = load_model(meant, admit=memory.admit, identify=name, part=part)
        memory.loaded(loaded)
        return loaded

    def open_store(root: PrefixHash, label: str, hosts: Sequence[str]) -> FileStore | None:
        return open_followed_store(settings, link.rank, root, label, hosts)

    return Follower(link, load, summing(group), memory, open_store)


def follow(link: FollowerLink, group: mx.distributed.Group, settings: Settings) -> None:
    """Do as rank 0 tells until it says stop; leave the device, and wait for rank 0's end."""
    make_follower(link, group, settings).run()
    leave_device()
    link.answer(None)
    link.next()  # nothing comes: this process ends with rank 0's
