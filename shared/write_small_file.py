"""Writes a small file of this server's own, for its owner alone."""

import contextlib
import os
import secrets
from pathlib import Path

from hearth.shared.make_private_directory import make_private


def write_small_file(path: Path, data: bytes) -> None:
    """Put `data` in the place of what is at `path`, whole or not at all; make its directory.

    Of two that write at once one is lost. Raises: OSError.
    """
    make_private(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
