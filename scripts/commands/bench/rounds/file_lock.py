"""Keeps two runs from writing one file: each would lose what the other measured."""

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hearth.shared.errors import StartError


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Hold the right to write `path` for the length of the block; the system ends it with us.

    The lock lies among temporary files, so that nothing is left beside the user's.

    Raises:
        StartError: another process of this user holds it.
    """
    place = _place(path)
    if (handle := _locked(place)) is None:
        raise StartError(f"Another `hearth bench` writes {path}. Wait until it has ended.")
    try:
        yield
    finally:
        place.unlink(missing_ok=True)  # while it is held
        os.close(handle)


def has_other_runs(path: Path) -> bool:
    """Return whether this user has a run that writes another file than `path`."""
    own = _place(path)
    for place in own.parent.glob(f"{_prefix()}*.lock"):
        with contextlib.suppress(OSError), place.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if place != own:
                    return True
    return False


def _place(path: Path) -> Path:
    name = hashlib.blake2b(os.fsencode(path.resolve()), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir(), f"{_prefix()}{name}.lock")


def _prefix() -> str:
    return f"hearth-bench-{os.getuid()}-"


def _locked(place: Path) -> int | None:
    """Return the lock; None where somebody else holds it."""
    while True:
        # Nobody else's link is followed: the folder may be everybody's.
        handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        if _is_at(handle, place):
            return handle
        os.close(handle)  # it was let go and removed in between


def _is_at(handle: int, place: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(place, follow_symlinks=False))
    except FileNotFoundError:
        return False
