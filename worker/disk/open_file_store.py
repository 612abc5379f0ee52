"""Opens the directory of KV files as the settings say: where, how large, and nobody else's."""

import shutil
from typing import Final

from hearth.shared.private_files import private_directory
from hearth.shared.settings import Settings
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.backup_exclusion import exclude_from_backup
from hearth.worker.disk.file_store import FileStore

GB: Final = 1 << 30
DISK_SHARE: Final = 10  # kept KV takes 1 / 10 of its volume by default ...
FREE_DISK_SHARE: Final = 2  # ... 1 / 2 of what is free at most ...
DISK_BYTES_MIN: Final = 10 * GB  # ... and never less


def open_file_store(
    root: PrefixHash, settings: Settings, cut_label: str, ranks_here: int = 1
) -> FileStore | None:
    """Return the files of a root; None where nothing is written.

    `ranks_here` ranks of a model have files on this machine: each has its part of what is allowed.

    Raises:
        StartError: the directory is another user's, who could put anything there.
    """
    if settings.max_kv_size_gb == 0:
        return None
    if settings.kv_cache_dir.exists():  # else the file store makes it, where the disk lets it
        private_directory(settings.kv_cache_dir.resolve(), "KV_CACHE_DIR")
    exclude_from_backup(settings.kv_cache_dir)
    return FileStore(
        settings.kv_cache_dir,
        root,
        disk_bytes_max(settings) // ranks_here,
        settings.kv_disk_write_gb_per_day * GB // ranks_here,
        rule=cut_label,
    )


def disk_bytes_max(settings: Settings) -> int:
    """Return how many bytes kept KV may take on disk: as set, or by the size of the volume.

    A conversation of 60,000 tokens takes 4 GB on a model of 27 billion parameters.
    """
    if settings.max_kv_size_gb is not None:
        return settings.max_kv_size_gb * GB
    directory = settings.kv_cache_dir.resolve()
    while not directory.exists():
        directory = directory.parent
    volume = shutil.disk_usage(directory)
    nbytes = min(volume.total // DISK_SHARE, volume.free // FREE_DISK_SHARE)
    return max(DISK_BYTES_MIN, nbytes)
