"""Reads a small file of this server's own, whatever lies in its place.

A fifo there would be waited for without end, and a link would lead elsewhere.
"""

import os
import stat
from errno import EFBIG, EINVAL, EPERM
from pathlib import Path


def read_small_file(path: Path, bytes_max: int) -> bytes:
    """Return what the file at `path` holds.

    Raises:
        OSError: it is not there, cannot be read, is a link, no plain file or another user's, or
            holds over `bytes_max` bytes.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(EINVAL, f"{path} is no plain file")
        if status.st_uid != os.getuid():
            raise OSError(EPERM, f"{path} is another user's")
        if status.st_size > bytes_max:
            size = status.st_size
            raise OSError(EFBIG, f"{path} has {size:,} bytes, and {bytes_max:,} are read at most")
        return os.read(handle, bytes_max)
    finally:
        os.close(handle)
