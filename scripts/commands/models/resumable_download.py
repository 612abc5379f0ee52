"""Fetches one large file of the hub so that a killed fetch goes on where it was.

The hub's own library begins each file anew, in a temporary file that no later process finds. Here
the bytes that came stay beside the blobs of its cache, and a blob gets its name only when its
SHA-256 is the one that the hub told: a file under that name is whole. The library's own lock keeps
two processes from fetching the same file.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import BinaryIO, Final

import filelock
import httpx
from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.utils import WeakFileLock, build_hf_headers

from hearth.commands.models.hub_repository import HubFile, HubModel, ModelError

READ_BYTES: Final = 1024 * 1024
TRIES_MAX: Final = 5  # in a row without a byte
WAIT_S: Final = 1.0  # before the second try, twice as long before the next
WAIT_S_MAX: Final = 60.0
LOCK_TOLD_AFTER_S: Final = 1.0
LEFTOVER_LOCK_S: Final = 0.05  # one that is locked is being fetched
_LATER: Final = frozenset((408, 429, 500, 502, 503, 504))


class ResumableDownload:
    """One large file on its way into the hub's cache. Used by one thread.

    `on_bytes` is told the change of how many bytes of it are here, wherever they came from.
    Where `is_over` says that nobody waits any more, what came is kept and the rest left.
    """

    def __init__(
        self,
        model: HubModel,
        file: HubFile,
        on_bytes: Callable[[int], None],
        is_over: Callable[[], bool] = lambda: False,
        wait_s: float = WAIT_S,
    ) -> None:
        assert file.is_large, file
        self._file = file
        self._url = hf_hub_url(model.hub_id, file.path, revision=model.revision.resolved)
        self._hub_id = model.hub_id
        self._on_bytes = on_bytes
        self._is_over = is_over
        self._wait_s = wait_s
        self.blob = model.folder / "blobs" / file.digest
        self.partial = self.blob.with_name(f"{file.digest}.incomplete")
        self._lock = _lock_of(model, file.digest)
        self._here = 0  # bytes that `on_bytes` knows of
        self._digest = hashlib.sha256()

    @property
    def missing_bytes(self) -> int:
        """What is still to come, as the sizes of the files say."""
        if self.blob.exists():
            return 0
        here = self.partial.stat().st_size if self.partial.exists() else 0
        return max(0, self._file.nbytes - here)

    def run(self, say: Callable[[str], None]) -> None:
        """Have the file whole and checked in the cache. `say` tells that it waits for another.

        Raises:
            ModelError: it is not what the hub told, or the disk is full.
            HfHubHTTPError, httpx.HTTPError: the hub does not give it.
        """
        self.blob.parent.mkdir(parents=True, exist_ok=True)
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        with self._alone(say):
            if self.blob.exists():
                if self._is_whole():
                    return
                self.blob.unlink()  # altered on this disk
                self._tell(0)
            try:
                self._fetch()
            except OSError as error:
                if error.errno in (ENOSPC, EDQUOT):
                    raise ModelError(self._full()) from error
                raise

    @contextlib.contextmanager
    def _alone(self, say: Callable[[str], None]) -> Iterator[None]:
        is_told = False
        with contextlib.ExitStack() as held:
            while True:
                try:
                    held.enter_context(WeakFileLock(self._lock, timeout=LOCK_TOLD_AFTER_S))
                    break
                except filelock.Timeout:
                    self._check_awaited()
                if not is_told:
                    say(f"{self._file.path} is being fetched by another process; waiting for it")
                is_told = True
            yield

    def _fetch(self) -> None:
        with self.partial.open("ab+") as target:
            self._read_again(target)
            tries = 0
            while (before := target.tell()) < self._file.nbytes:
                try:
                    self._receive(target)
                except (httpx.TransportError, _TryAgain) as error:
                    tries = 0 if target.tell() > before else tries + 1
                    if tries >= TRIES_MAX:
                        raise self._given_up(error, target.tell()) from error
                    self._check_awaited()
                    time.sleep(min(self._wait_s * 2**tries, WAIT_S_MAX))
            os.fsync(target.fileno())
        if self._digest.hexdigest() != self._file.digest:
            self.partial.unlink()
            self._tell(0)
            raise ModelError(self._altered())
        os.replace(self.partial, self.blob)

    def _read_again(self, target: BinaryIO) -> None:
        """Tell the digest what is here from a fetch before."""
        self._digest = hashlib.sha256()
        if os.fstat(target.fileno()).st_size > self._file.nbytes:
            target.truncate(0)
        target.seek(0)
        while part := target.read(READ_BYTES):
            self._digest.update(part)
            self._tell(target.tell())
        target.seek(0, os.SEEK_END)

    def _receive(self, target: BinaryIO) -> None:
        """Append what one answer of the hub brings."""
        headers = {**build_hf_headers(), "accept-encoding": "identity"}
        if here := target.tell():
            headers["range"] = f"bytes={here}-"
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream(
            "GET", self._url, headers=headers, follow_redirects=True, timeout=timeout
        ) as answer:
            if answer.status_code in _LATER:
                raise _TryAgain(f"it answered {answer.status_code}")
            if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise ModelError(self._short(here, "it has no more"))
            hf_raise_for_status(answer)
            if here and answer.status_code != httpx.codes.PARTIAL_CONTENT:
                target.truncate(0)  # this hub begins each answer anew
                self._read_again(target)
            for part in answer.iter_raw():
                if target.tell() + len(part) > self._file.nbytes:
                    raise ModelError(self._too_long())
                target.write(part)
                target.flush()  # what is told to be here outlives this process
                self._digest.update(part)
                self._tell(target.tell())
                self._check_awaited()
        if target.tell() < self._file.nbytes:
            raise _TryAgain("its answer ended early")

    def _check_awaited(self) -> None:
        if self._is_over():
            raise ModelError(f"{self._file.path} was left: what came is kept.")

    def _tell(self, here: int) -> None:
        self._on_bytes(here - self._here)
        self._here = here

    def _is_whole(self) -> bool:
        """Whether the blob that is here is what the hub told."""
        digest = hashlib.sha256()
        with self.blob.open("rb") as file:
            while part := file.read(READ_BYTES):
                digest.update(part)
                self._tell(file.tell())
        self._digest = digest
        return digest.hexdigest() == self._file.digest

    # ------------------------------------------------------------ what is told

    def _given_up(self, error: Exception, here: int) -> Exception:
        is_short = isinstance(error, _TryAgain)
        reason = f"{TRIES_MAX} tries in a row brought no more: {error}"
        return ModelError(self._short(here, reason)) if is_short else error

    def _short(self, here: int, reason: str) -> str:
        return (
            f"{self._file.path} of {self._hub_id} stays short: {here:,} of {self._file.nbytes:,} "
            f"bytes came ({reason}). Pull again later: what came is kept. If it stays so, use "
            "another mirror (HF_ENDPOINT)."
        )

    def _too_long(self) -> str:
        self.partial.unlink(missing_ok=True)
        return (
            f"{self._file.path} of {self._hub_id} is longer than the {self._file.nbytes:,} bytes "
            "that the hub told. Nothing of it is kept. Pull again, or use another mirror "
            "(HF_ENDPOINT)."
        )

    def _altered(self) -> str:
        return (
            f"{self._file.path} of {self._hub_id} came altered: its SHA-256 is "
            f"{self._digest.hexdigest()}, and the hub told {self._file.digest}. Nothing of it is "
            "kept. Pull again; if it comes so again, use another mirror (HF_ENDPOINT)."
        )

    def _full(self) -> str:
        here = self.partial.stat().st_size if self.partial.exists() else 0
        return (
            f"The disk is full: {here:,} of {self._file.nbytes:,} bytes of {self._file.path} came "
            f"into {self.blob.parent}. Make room there, or set HF_HOME to a larger disk, and pull "
            "again: what came is kept."
        )


def remove_leftovers(model: HubModel) -> None:
    """Remove what killed downloads of the hub's own library left, which nothing goes on with."""
    for path in (model.folder / "blobs").glob("*.*.incomplete"):
        lock = _lock_of(model, path.name.partition(".")[0])
        with contextlib.suppress(filelock.Timeout), WeakFileLock(lock, timeout=LEFTOVER_LOCK_S):
            path.unlink(missing_ok=True)


def _lock_of(model: HubModel, digest: str) -> Path:
    """Return the file by which the hub's library locks a blob."""
    return model.folder.parent / ".locks" / model.folder.name / f"{digest}.lock"


class _TryAgain(Exception):
    """The hub did not give all of it, and may the next time."""
