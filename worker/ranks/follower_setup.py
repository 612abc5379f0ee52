"""Makes what a follower needs to do as it is told: its part of the model, its memory.

Owner: the thread that computes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import mlx.core as mx

from hearth.shared.settings_from_env import Settings
from hearth.worker.cache.block_hash import PrefixHash, schema_root
from hearth.worker.disk.file_store import FileStore
from hearth.worker.disk.open_file_store import open_file_store
from hearth.worker.doctor.checked_machine import chip
from hearth.worker.engine.engine import leave_device
from hearth.worker.engine.model_loader import LoadedModel, load_model
from hearth.worker.ranks.agreed_tokens import Sum, sum_over
from hearth.worker.ranks.follower import Follower, FollowerMemory
from hearth.worker.ranks.loading.sharded_model import Sharded
from hearth.worker.ranks.transport.follower_link import FollowerLink
from hearth.worker.setup.kv_setup import identify


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


def open_followed_store(
    settings: Settings, rank: int, root: PrefixHash, cut_label: str, hosts: Sequence[str]
) -> FileStore | None:
    """Return a rank's files of rank 0's `root`; None where nothing is written.

    `hosts` are the ranks', in order. The root of its own names the rank and its chip, so that a
    file that is moved between machines or directories passes for no other's.

    Raises:
        StartError: the directory is another user's.
    """
    directory = settings.kv_cache_dir / f"rank-{rank}-of-{len(hosts)}"
    own_root = schema_root([root.hex(), f"rank {rank}", chip()])
    own = dataclasses.replace(settings, kv_cache_dir=directory)
    return open_file_store(own_root, own, cut_label, ranks_here=[*hosts].count(hosts[rank]))
