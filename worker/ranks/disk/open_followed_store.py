"""Opens the KV files of one of ranks 1 and up: a directory and a root of its own."""

import dataclasses
from collections.abc import Sequence

from hearth.shared.settings_from_env import Settings
from hearth.worker.cache.block_hash import PrefixHash, schema_root
from hearth.worker.disk.file_store import FileStore
from hearth.worker.disk.open_file_store import open_file_store
from hearth.worker.doctor.checked_machine import chip


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
