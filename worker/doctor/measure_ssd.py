"""Measures how fast KV_CACHE_DIR is written and read, within the day's writes."""

import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import xxhash

from hearth.shared.make_private_directory import make_private
from hearth.worker.disk.file_names import TEMP_PREFIX
from hearth.worker.disk.shared_usage_counters import locked_counters
from hearth.worker.doctor.check_context import CheckContext, LeftOut, Steps
from hearth.worker.doctor.findings import FOLDER, Figure

SSD: Final = "SSD"
PIECE_BYTES: Final = 4 << 20  # a request waits for one
PIECES_MIN: Final = 4
SYNC_EVERY: Final = 8  # pieces
FREE_SHARE: Final = 0.1  # of the disk's free bytes that may be written
LOCK_WAIT_S_MAX: Final = 0.5
DAY_S: Final = 86_400
F_NOCACHE: Final = 48  # macOS: reads go past the system's cache


def measure_ssd(context: CheckContext) -> Steps:
    """Write a file beside the cache, read it back past the system's cache, remove it."""
    context.begin(SSD)
    directory = context.rules.ssd_directory
    if directory is None:
        raise LeftOut("nothing is written here (MAX_KV_SIZE_GB=0)")
    try:
        yield from _measure(context, directory)
    except OSError as error:
        raise LeftOut(f"the disk refuses: {error.strerror or type(error).__name__}") from error


def _measure(context: CheckContext, directory: Path) -> Steps:
    folder = directory / FOLDER
    make_private(folder)
    pieces = _charged(context, directory)
    handle, name = tempfile.mkstemp(prefix=TEMP_PREFIX, dir=folder)
    try:
        write_s, written = yield from _write(handle, pieces)
        read_s, read = yield from _read(handle)
    finally:
        os.close(handle)
        os.unlink(name)
    mb = pieces * PIECE_BYTES / 1e6
    figures: dict[str, Figure] = {
        "mb": mb,
        "write_mb_per_s": mb / max(write_s, 1e-9),
        "read_mb_per_s": mb / max(read_s, 1e-9),
    }
    is_same = read == written
    reason = "" if is_same else "what was read is not what was written"
    context.tell("ok" if is_same else "fault", figures, reason)


def _charged(context: CheckContext, directory: Path) -> int:
    """Return how many pieces are written, which the day's count has then. Raises: LeftOut."""
    stat = os.statvfs(directory)
    free = int(stat.f_bavail * stat.f_frsize * FREE_SHARE)
    pieces = min(context.rules.ssd_bytes, free) // PIECE_BYTES
    per_day = context.rules.ssd_bytes_per_day
    with locked_counters(directory, LOCK_WAIT_S_MAX) as counters:
        counters.turn_to(int(time.time() // DAY_S))
        if per_day:
            pieces = min(pieces, (per_day - counters.bytes_written) // PIECE_BYTES)
        if pieces < PIECES_MIN:
            raise LeftOut("the disk is nearly full, or the day's writes are spent")
        counters.bytes_written += pieces * PIECE_BYTES
        counters.save()
    return pieces


def _write(handle: int, pieces: int) -> Generator[None, None, tuple[float, str]]:
    digest, seconds = xxhash.xxh3_64(), 0.0
    for number in range(pieces):
        piece = os.urandom(PIECE_BYTES)  # an SSD that compresses finds nothing
        digest.update(piece)
        began = time.perf_counter()
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(handle, rest) :]
        if (number + 1) % SYNC_EVERY == 0 or number + 1 == pieces:
            os.fsync(handle)
        seconds += time.perf_counter() - began
        yield
    return seconds, digest.hexdigest()


def _read(handle: int) -> Generator[None, None, tuple[float, str]]:
    digest, seconds = xxhash.xxh3_64(), 0.0
    _bypass_cache(handle)
    os.lseek(handle, 0, os.SEEK_SET)
    while True:
        began = time.perf_counter()
        piece = os.read(handle, PIECE_BYTES)
        seconds += time.perf_counter() - began
        if not piece:
            return seconds, digest.hexdigest()
        digest.update(piece)
        yield


def _bypass_cache(handle: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(handle, F_NOCACHE, 1)
        return
    advise: Any = getattr(os, "posix_fadvise", None)
    if advise is not None:
        advise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
