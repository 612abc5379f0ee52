"""Opens the directory of KV files by the settings, and keeps it private and out of backups.

Time Machine would copy every file that the cache writes, and keep evicted files in local snapshots.
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
DISK_SHARE: Final = 10  # by default, kept KV takes at most 1 / 10 of the volume
FREE_DISK_SHARE: Final = 2  # by default, kept KV takes at most 1 / 2 of the free space
DISK_BYTES_MIN: Final = 10 * GB  # bytes that kept KV may always take
# The attribute that `tmutil addexclusion` sets. It moves with the directory and covers all files.
ATTRIBUTE: Final = "com.apple.metadata:com_apple_backup_excludeItem"
EXCLUDED: Final = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
NEVER_INDEX: Final = ".metadata_never_index"  # Spotlight skips a directory with this file

SetAttribute = Callable[[Path, str, bytes], None]

log = logging.getLogger(__name__)


def open_file_store(
    root: PrefixHash, settings: Settings, cut_label: str, ranks_here: int = 1
) -> FileStore | None:
    """Return the file store of a root; None if the settings turn the disk off.

    `ranks_here` is the number of the model's ranks on this machine, which share the limits.

    Raises:
        StartError: the directory belongs to another user, who could put any file there.
    """
    if settings.max_kv_size_gb == 0:
        return None
    if settings.kv_cache_dir.exists():  # a missing directory is created by the file store
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
    """Return how many bytes kept KV may take on disk: the setting, or a share of the volume.

    With a model of 27 billion parameters, a conversation of 60,000 tokens takes 4 GB.
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
    """Set an extended attribute: Python has no `os.setxattr` on macOS. Raises: OSError.

    Linux's call has no `position`; its fifth argument, the flags, is 0 as well.
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
    """Create `directory` and exclude it from backups, on macOS only. A failure is logged."""
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
