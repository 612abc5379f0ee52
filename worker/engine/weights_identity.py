"""Identifies a checkpoint's weights by a hash of every byte of their files.

KV of other weights would give wrong answers. Name, size and time of writing do not identify
weights: a copy by rsync or cp may keep all three.
A file is hashed once. Its hash is remembered under path, size, time of writing, and two values that
no copy can set: the inode and the time of the last change. A blob in a hub's cache is named by its
own digest, but is hashed too, since a change in place keeps the name.
The hash is xxh3 of 128 bits. It finds changes, not forgeries: whoever makes two checkpoints
with equal hashes mixes up only the KV of their own models.
"""

import contextlib
import fcntl
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_128

from hearth.shared.models.local_models import files_like
from hearth.shared.private_files import read_small_file, write_small_file

log = logging.getLogger(__name__)

# The files that the KV of given tokens depends on: weights (and adapters beside them), their
# configuration, and code that ALLOW_MODEL_CODE lets run. Not the tokenizer: the cache hashes
# tokens.
PATTERNS: Final = ("*.safetensors", "config.json", "*.py")
BLOCK_BYTES: Final = 8 << 20
THREADS_MAX: Final = 4  # an SSD is faster with several readers; xxh3 is faster than any SSD
WAIT_S: Final = 0.5  # time between two checks of whether the process ends
SCHEMA: Final = 1  # version of the file of remembered hashes
MEMORY_NAME: Final = "weight-hashes.json"  # in KV_CACHE_DIR
MEMORY_BYTES_MAX: Final = 1 << 20
FILES_MAX: Final = 2048  # remembered files; a model of 400 GB has about a hundred
# A second change within the resolution of a file system's clock leaves the time as it was. The
# coarsest clocks have 2 s.
SETTLED_NS: Final = 2_000_000_000
# File systems with a resolution of 10 ms or more (exFAT, FAT, HFS+) may have no time of change, and
# report the time of writing instead, which any program can set.
COARSE_NS: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Identifies one state of one file, by what its file system reports."""

    path: str  # resolved, so that a link to another file is another path
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @property
    def shows_changes(self) -> bool:
        """Whether a change of the file will show in its stamp."""
        is_settled = abs(time.time_ns() - self.ctime_ns) > SETTLED_NS
        return is_settled and self.ctime_ns % COARSE_NS != 0


def stamp_of(path: Path) -> FileStamp:
    """Return the stamp of the file that `path` resolves to. Raises: OSError."""
    real = os.path.realpath(path)
    status = os.stat(real)
    return FileStamp(real, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class HashMemory:
    """Remembers hashes by stamps, in a file (0600) that workers and servers share.

    The file is replaced as a whole. If two processes write at once, the hashes of one are lost and
    made again later. A damaged file, or a file that others could write, counts as empty. No method
    raises for errors of the disk. Any thread.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / MEMORY_NAME

    def load(self) -> dict[FileStamp, str]:
        try:
            if self._path.lstat().st_mode & 0o077:
                raise ValueError("others could have written it")
            content = json.loads(read_small_file(self._path, MEMORY_BYTES_MAX))
            if content["schema"] != SCHEMA:
                raise ValueError(f"its schema is {content['schema']!r}, expected {SCHEMA}")
            return dict(_entry(*entry) for entry in content["files"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"{type(error).__name__} {error}"
            log.warning("what is remembered of the weights' hashes cannot be read: %s", reason)
            return {}

    def add(self, hashes: Mapping[FileStamp, str]) -> None:
        """Add `hashes` to the file. Only the newest FILES_MAX stay."""
        replaced = {stamp.path for stamp in hashes}
        kept = {stamp: value for stamp, value in self.load().items() if stamp.path not in replaced}
        entries = [[*astuple(stamp), value] for stamp, value in {**kept, **hashes}.items()][
            -FILES_MAX:
        ]
        try:
            write_small_file(self._path, json.dumps({"schema": SCHEMA, "files": entries}).encode())
        except OSError as error:
            log.warning("the weights' hashes are not remembered, and made at each start: %s", error)


def _entry(path: Any, *rest: Any) -> tuple[FileStamp, str]:
    *numbers, value = rest
    if not isinstance(path, str) or len(numbers) != 4 or len(bytes.fromhex(value)) != 16:
        raise ValueError(f"a row is {[path, *rest]!r:.80}")
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"a row's numbers are {numbers!r:.80}")
    return FileStamp(path, *numbers), value


class WeightsIdentity:
    """Hashes the files of one checkpoint, in threads of its own while the model loads.

    `parts` blocks until the files are hashed. A file that changes between the constructor and
    `parts` gets a random identity, which no other process has.
    Owner: the inference thread, except for the hashing threads.
    """

    def __init__(
        self,
        directory: Path,
        memory: HashMemory | None = None,
        is_hashed: bool = True,
        is_over: Callable[[], bool] = lambda: False,
        patterns: Iterable[str] = PATTERNS,
    ) -> None:
        """Read the stamps of the files of `patterns`, and start to hash those without a known hash.

        Unless `is_hashed`, the stamps identify the files, which is enough for KV that ends with
        this process. `is_over` returns whether the process ends.

        Raises:
            OSError: a file's stamp cannot be read.
        """
        self._paths = files_like(directory, patterns)
        self._before = {path: stamp_of(path) for path in self._paths}
        self._memory = memory
        self._is_over = is_over
        self._began_at = time.monotonic()
        known = memory.load() if memory is not None and is_hashed else {}
        self._hashes = {stamp: known[stamp] for stamp in self._before.values() if stamp in known}
        self._made: dict[FileStamp, str] = {}
        self._error: OSError | None = None
        stamped = tuple(f"{path.name} {astuple(stamp)}" for path, stamp in self._before.items())
        self._parts: tuple[str, ...] | None = None if is_hashed else stamped
        missing = {stamp for stamp in self._before.values() if stamp not in self._hashes}
        self._threads = self._begin(missing) if is_hashed else []

    def parts(self) -> tuple[str, ...]:
        """Return each file's name and hash, which together identify the weights.

        Raises:
            OSError: a file could not be read.
            SystemExit: the process ends.
        """
        if self._parts is None:
            self._wait()
            self._remember()
            self._parts = tuple(self._part(path) for path in self._paths)
        return self._parts

    def _begin(self, missing: Iterable[FileStamp]) -> list[threading.Thread]:
        files: queue.SimpleQueue[FileStamp] = queue.SimpleQueue()
        for stamp in sorted(missing, key=lambda stamp: -stamp.size):
            files.put(stamp)
        threads = [
            threading.Thread(target=self._hash_files, args=(files,), name="hash", daemon=True)
            for _ in range(min(THREADS_MAX, files.qsize()))
        ]
        for thread in threads:
            thread.start()
        return threads

    def _hash_files(self, files: "queue.SimpleQueue[FileStamp]") -> None:
        with contextlib.suppress(queue.Empty):
            while self._error is None and not self._is_over():
                stamp = files.get_nowait()
                try:
                    found = hash_file(stamp.path, self._is_over)
                except OSError as error:
                    self._error = error
                    return
                if found is not None:
                    self._made[stamp] = found

    def _wait(self) -> None:
        for thread in self._threads:
            while thread.is_alive():
                thread.join(WAIT_S)
                if self._is_over():
                    raise SystemExit
        if self._error is not None:
            raise self._error
        if self._is_over():
            raise SystemExit

    def _remember(self) -> None:
        """Remember the new hashes of files that have not changed meanwhile."""
        size, seconds = sum(stamp.size for stamp in self._made), time.monotonic() - self._began_at
        if self._made:
            text = "hashed %d files of weights beside loading them: mb=%d s=%.1f"
            log.info(text, len(self._made), size >> 20, seconds)
        self._hashes |= self._made
        now = {
            stamp
            for stamp in map(_stamp_now, self._paths)
            if stamp is not None and stamp.shows_changes
        }
        lasting = {stamp: value for stamp, value in self._made.items() if stamp in now}
        if self._memory is not None and lasting:
            self._memory.add(lasting)

    def _part(self, path: Path) -> str:
        before = self._before[path]
        if _stamp_now(path) == before:
            return f"{path.name} {self._hashes[before]}"
        log.warning("%s was changed while it was loaded: no KV from before is reused", path.name)
        return f"{path.name} {secrets.token_hex(16)}"


def hash_file(path: str, is_over: Callable[[], bool] = lambda: False) -> str | None:
    """Return the hash of a file's bytes; None if `is_over` becomes true. Raises: OSError."""
    digest = xxh3_128()
    block = memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        # Reading must not push other files out of the system's cache.
        with contextlib.suppress(OSError):
            if hasattr(fcntl, "F_NOCACHE"):  # macOS
                fcntl.fcntl(file.fileno(), fcntl.F_NOCACHE, 1)
            elif hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_NOREUSE)
        while count := file.readinto(block):
            digest.update(block[:count])
            if is_over():
                return None
    return digest.hexdigest()


def _stamp_now(path: Path) -> FileStamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None
