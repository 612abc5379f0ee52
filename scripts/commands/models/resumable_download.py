"""Fetches one large file of the hub so that a killed fetch goes on where it was.

The hub's library begins each file anew: its temporary file has the process's own name, and Ctrl-C
removes it. Here its `http_get` appends to a file that stays beside the blobs of its cache, and a
blob gets its name only when its SHA-256 is the one that the hub told: a file under that name is
whole. The library's own lock keeps two processes from fetching the same file.
"""

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import filelock
from huggingface_hub import hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

from hearth.commands.models.hub_repository import HubFile, HubModel, ModelError

LOCK_TOLD_AFTER_S: Final = 1.0
LEFTOVER_LOCK_S: Final = 0.05  # one that is locked is being fetched
DISK_SPARE_BYTES: Final = 256 * 1024**2  # of the volume, left free
AGAIN: Final = "Pull again; if it stays so, use another mirror (HF_ENDPOINT)."


def blob_of(model: HubModel, file: HubFile) -> Path:
    return model.folder / "blobs" / file.digest


def partial_of(model: HubModel, file: HubFile) -> Path:
    """Return where the bytes of a file are that is not whole."""
    return model.folder / "blobs" / f"{file.digest}.incomplete"


def missing_bytes(model: HubModel, file: HubFile) -> int:
    """Return what is still to come, as the sizes of the files say."""
    if blob_of(model, file).exists():
        return 0
    partial = partial_of(model, file)
    return max(0, file.nbytes - (partial.stat().st_size if partial.exists() else 0))


def fetch(model: HubModel, file: HubFile, say: Callable[[str], None]) -> None:
    """Have a large file whole and checked in the cache. `say` tells that it waits for another.

    Raises:
        ModelError: it is not what the hub told.
        HfHubHTTPError, httpx.HTTPError, OSError: the hub does not give it, or the disk is full.
    """
    assert file.is_large, file
    blob, partial = blob_of(model, file), partial_of(model, file)
    blob.parent.mkdir(parents=True, exist_ok=True)
    with alone(_lock_of(model, file.digest), file.path, say):
        if blob.exists():
            if digest_of(blob) == file.digest:
                return
            blob.unlink()  # altered on this disk
        _receive(model, file, partial)
        if (found := digest_of(partial)) != file.digest:
            partial.unlink()
            raise ModelError(
                f"{file.path} of {model.hub_id} came altered: its SHA-256 is {found}, and the hub "
                f"told {file.digest}. Nothing of it is kept. {AGAIN}"
            )
        os.replace(partial, blob)


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_disk(what: str, directory: Path, missing: int, setting: str) -> None:
    """Raise ModelError where the volume of `directory` has no room for so many bytes more.

    `setting` is the variable that names another directory.
    """
    place = directory
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if missing and missing + DISK_SPARE_BYTES > free:
        raise ModelError(
            f"{what} needs {missing / 1e9:.2f} GB more on disk (and {DISK_SPARE_BYTES / 1e9:.2f} "
            f"GB are left free), and {free / 1e9:.2f} GB are free in {directory}. Make room there "
            f"(`hearth rm`), or set {setting} to a larger disk."
        )


@contextlib.contextmanager
def alone(lock: filelock.BaseFileLock, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold `lock`; say that another process fetches `what` where that takes long."""
    try:
        lock.acquire(timeout=LOCK_TOLD_AFTER_S)
    except filelock.Timeout:
        say(f"{what} is being fetched by another process; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _lock_of(model: HubModel, digest: str) -> filelock.BaseFileLock:
    """Return the lock of the hub's library for a blob."""
    path = model.folder.parent / ".locks" / model.folder.name / f"{digest}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return filelock.FileLock(path)


def remove_leftovers(model: HubModel) -> None:
    """Remove what killed downloads of the hub's own library left, which nothing goes on with."""
    for path in (model.folder / "blobs").glob("*.*.incomplete"):
        lock = _lock_of(model, path.name.partition(".")[0])
        with contextlib.suppress(filelock.Timeout), lock.acquire(timeout=LEFTOVER_LOCK_S):
            path.unlink(missing_ok=True)


def _receive(model: HubModel, file: HubFile, partial: Path) -> None:
    """Append to `partial` what is missing of it."""
    url = hf_hub_url(model.hub_id, file.path, revision=model.revision.resolved)
    with _BoundedFile(partial, file.nbytes) as target:
        if (here := target.seek(0, os.SEEK_END)) > file.nbytes:
            target.truncate(0)  # it is of no file that the hub told
            here = target.seek(0)
        headers = {**build_hf_headers(), "accept-encoding": "identity"}
        try:
            http_get(
                url,
                target,
                resume_size=here,
                headers=headers,
                expected_size=file.nbytes,
                displayed_filename=file.path,
            )
        except TooLongError:
            partial.unlink()
            raise ModelError(
                f"{file.path} of {model.hub_id} is longer than the {file.nbytes:,} bytes that the "
                f"hub told. Nothing of it is kept. {AGAIN}"
            ) from None
        except OSError as error:
            if error.errno is not None or target.tell() == file.nbytes:
                raise
            raise ModelError(
                f"{file.path} of {model.hub_id} stays short: {target.tell():,} of {file.nbytes:,} "
                f"bytes came. What came is kept. {AGAIN}"
            ) from error
        os.fsync(target.fileno())


class TooLongError(Exception):
    """More bytes come than the hub told."""


class _BoundedFile(io.FileIO):
    """A file that is appended to, up to `bytes_max`: a hub may send without an end."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        super().__init__(path, "ab+")
        self._bytes_max = bytes_max

    def write(self, part: bytes) -> int:  # type: ignore[override]
        if self.tell() + len(part) > self._bytes_max:
            raise TooLongError
        return super().write(part)
