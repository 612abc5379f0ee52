"""Keeps what MLX compiles on a CPU out of directories that other users can write to.

There it writes its kernels as libraries into `TMPDIR/mlx/<version>/cpu`, /tmp by default, and loads
what it finds under their names, which anybody can know: who made that directory first would run
code in the worker. It cannot compute either where that directory is missing, full or closed.
"""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hearth.shared.errors import StartError
from hearth.shared.paths import HOME_DIR
from hearth.shared.zmq_transport import private_directory

PRIVATE_TEMP: Final = HOME_DIR / "tmp"  # for all of a user's servers: compiling takes seconds
_DEFAULT: Final = "/tmp"


def temp_environment(environ: Mapping[str, str], instance_dir: Path) -> dict[str, str]:
    """Return what to add to `environ` for a process that runs MLX.

    Nothing where its temporary directory is closed to all others, as on macOS: below it MLX makes
    directories of whatever mode the umask leaves. `instance_dir` is private, and holds what is
    compiled where the home directory cannot be written.

    Raises:
        StartError: neither can be written.
    """
    if _is_private(Path(environ.get("TMPDIR") or _DEFAULT)):
        return {}
    for directory in (PRIVATE_TEMP, instance_dir / "tmp"):
        with contextlib.suppress(StartError, OSError):
            private_directory(directory)
            if _is_private(directory):
                return {"TMPDIR": str(directory)}
    raise StartError(
        f"Neither {PRIVATE_TEMP} nor {instance_dir / 'tmp'} can be made a directory for what MLX "
        "compiles. Make one of them writable, or set TMPDIR to a directory of yours (chmod 700)."
    )


def _is_private(directory: Path) -> bool:
    """Whether this user can write to the directory, and nobody else can enter it."""
    try:
        status = directory.stat()
    except OSError:
        return False
    is_closed = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_ours and is_closed and os.access(directory, os.W_OK | os.X_OK)
