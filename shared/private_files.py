"""Makes directories that only their owner can enter, and reads and writes small private files.

Fifos and links are never read: reading a fifo could wait for ever, and a link could lead elsewhere.
"""

import contextlib
import os
import secrets
import stat
from errno import EFBIG, EINVAL, EPERM
from pathlib import Path

from hearth.shared.errors import StartError


def make_private(directory: Path) -> None:
    """Make `directory` and its missing parents, for their owner alone. Raises: OSError.

    Each has a call of its own: `mkdir(parents=True)` would leave the parents' mode to the umask.
    """
    for ancestor in reversed((directory, *directory.parents)):
        if not ancestor.exists():
            ancestor.mkdir(mode=0o700, exist_ok=True)


def private_directory(path: Path, setting: str = "RUN_DIR") -> Path:
    """Make `path` a directory that only this user can enter, and return it.

    Raises:
        StartError: the path belongs to another user, is not a directory, or cannot be made; the
            text names `setting`, which holds the path.
    """
    try:
        make_private(path)
    except OSError as error:
        raise StartError(
            f"{setting}: {path} cannot be made ({error.strerror}). Set {setting}."
        ) from None
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StartError(f"{setting}: {path} is not a directory. Remove it or set {setting}.")
    if status.st_mode & stat.S_ISVTX or path.resolve() == Path("/"):
        raise StartError(
            f"{setting}: {path} is for all users of this machine, and would be closed to them. "
            f"Set {setting} to a directory below it."
        )
    if status.st_uid != os.getuid():
        raise StartError(f"{setting}: {path} belongs to user {status.st_uid}. Set {setting}.")
    if stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):  # a disk may be read-only
        path.chmod(0o700)
    return path


def own_run_directory(run_dir: Path, port: int) -> Path:
    """Make the socket directory of `port` in RUN_DIR, and return it.

    Raises:
        StartError: as in `private_directory`, or other users could replace the directory.
    """
    directory = private_directory(run_dir / str(port))
    status = run_dir.stat()
    is_open = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    if is_open or status.st_uid not in (0, os.getuid()):
        raise StartError(
            f"RUN_DIR: other users of this machine can change {run_dir}, and read what is sent "
            "through its sockets. Set RUN_DIR to a directory of yours."
        )
    return directory


def read_small_file(path: Path, bytes_max: int) -> bytes:
    """Return the content of the file at `path`.

    Raises:
        OSError: the file is missing, unreadable, a link, no plain file, another user's, or longer
            than `bytes_max`.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(EINVAL, f"{path} is no plain file")
        if status.st_uid != os.getuid():
            raise OSError(EPERM, f"{path} is another user's")
        if status.st_size > bytes_max:
            sizes = f"{status.st_size:,} bytes, and {bytes_max:,} are read at most"
            raise OSError(EFBIG, f"{path} has {sizes}")
        return os.read(handle, bytes_max)
    finally:
        os.close(handle)


def write_small_file(path: Path, data: bytes) -> None:
    """Replace the file at `path` with `data`, atomically; make its directory if it is missing.

    The last of two concurrent writers wins. Raises: OSError.
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
