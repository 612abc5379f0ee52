"""Keeps a directory whose files can be made again out of a Mac's backups and its search index.

Time Machine would copy, and hold in local snapshots, all that the cache writes and evicts.
"""

import ctypes
import logging
import os
import plistlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hearth.shared.private_files import make_private

log = logging.getLogger(__name__)

# What `tmutil addexclusion` sets; it goes with the directory and takes in all that is below it.
ATTRIBUTE: Final = "com.apple.metadata:com_apple_backup_excludeItem"
EXCLUDED: Final = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
NEVER_INDEX: Final = ".metadata_never_index"  # Spotlight leaves out a directory that has it

SetAttribute = Callable[[Path, str, bytes], None]


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
