"""Opens the directory of KV files as the settings say: where, how large, and nobody else's.

Nor in a Mac's backups: Time Machine would copy, and hold in local snapshots, all that the cache
writes and evicts.
"""

import ctypes
import logging
import os
import plistlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hearth.shared.private_files import make_private, private_directory
from hearth.shared.settings import Settings
from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.disk.file_store import FileStore

GB: Final = 1 << 30
DISK_SHARE: Final = 10  # kept KV takes 1 / 10 of its volume by default ...
FREE_DISK_SHARE: Final = 2  # ... 1 / 2 of what is free at most ...
DISK_BYTES_MIN: Final = 10 * GB  # ... and never less
# What `tmutil addexclusion` sets; it goes with the directory and takes in all that is below it.
ATTRIBUTE: Final = "com.apple.metadata:com_apple_backup_excludeItem"
EXCLUDED: Final = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
NEVER_INDEX: Final = ".metadata_never_index"  # Spotlight leaves out a directory that has it

SetAttribute = Callable[[Path, str, bytes], None]

log = logging.getLogger(__name__)


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


def set_attribute(path: Path, name: str, value: bytes) -> None:
    """Set an extended attribute, as macOS's Python has no `os.setxattr`. Raises: OSError.

    Linux's call has no `position`; what stands in its place there, flags, is 0 as well.
    """
    setxattr = ctypes.CDLL(None, use_errno=True).setxattr
    setxattr.argtypes = (
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
        *(ctypes.c_uint32, ctypes.c_int),
    )
    if setxattr(os.fsencode(path), name.encode(), value, len(value), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))


def exclude_from_backup(
    directory: Path, platform: str = sys.platform, set_attribute: SetAttribute = set_attribute
) -> None:
    """Make `directory`, and exclude it. Does nothing but on macOS; what fails is told."""
    if platform != "darwin":
        return
    try:
        make_private(directory)
        (directory / NEVER_INDEX).touch(mode=0o600)
        set_attribute(directory, ATTRIBUTE, EXCLUDED)
    except OSError as error:
        log.warning(
            "%s is backed up by Time Machine (%s). Run: tmutil addexclusion %s",
            directory,
            error.strerror,
            directory,
        )
