"""Makes directories that only their owner can enter, and small files of this server's own.

A fifo in a file's place would be waited for without end, and a link would lead elsewhere: neither
is read.
"""

import contextlib
import os
import secrets
import stat
from errno import EFBIG, EINVAL, EPERM
from pathlib import Path

from hearth.shared.errors import StartError


def make_private(directory: Path) -> None:
    """Make `directory` and what its path lacks, for their owner alone. Raises: OSError.

    One by one: `mkdir(parents=True)` would leave the mode of its parents to the umask.
    """
    for each in reversed((directory, *directory.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def private_directory(path: Path, setting: str = "RUN_DIR") -> Path:
    """Make `path` a directory that only this user can enter, and return it.

    Raises:
        StartError: it belongs to someone else, is not a directory, or cannot be made; the text
            names the `setting` that it comes from.
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
    if stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):  # else a disk may be read-only
        path.chmod(0o700)
    return path


def own_run_directory(run_dir: Path, port: int) -> Path:
    """Make the directory of the sockets of `port` in RUN_DIR, and return it.

    Raises:
        StartError: see `private_directory`; or others may put another directory in its place.
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
            sizes = f"{status.st_size:,} bytes, and {bytes_max:,} are read at most"
            raise OSError(EFBIG, f"{path} has {sizes}")
        return os.read(handle, bytes_max)
    finally:
        os.close(handle)


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
