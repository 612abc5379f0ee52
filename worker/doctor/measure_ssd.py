"""Measures how fast KV_CACHE_DIR is written and read, within the day's writes."""

import fcntl
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from hearth.shared.make_private_directory import make_private
from hearth.worker.disk.file_format import TEMP_PREFIX
from hearth.worker.disk.file_store import locked_counters
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
    make_private(directory / FOLDER)
    pieces, seed = _charged(context, directory), os.urandom(16)
    write_s = read_s = 1e-9
    changed = 0
    with tempfile.TemporaryFile(prefix=TEMP_PREFIX, dir=directory / FOLDER) as file:
        for number in range(pieces):
            piece = _piece(seed, number)
            began = time.perf_counter()
            file.write(piece)
            file.flush()
            if (number + 1) % SYNC_EVERY == 0 or number + 1 == pieces:
                os.fsync(file.fileno())
            write_s += time.perf_counter() - began
            yield
        _bypass_cache(file.fileno())
        file.seek(0)
        for number in range(pieces):
            began = time.perf_counter()
            piece = file.read(PIECE_BYTES)
            read_s += time.perf_counter() - began
            changed += piece != _piece(seed, number)
            yield
    mb = pieces * PIECE_BYTES / 1e6
    figures: dict[str, Figure] = {
        "mb": mb,
        "write_mb_per_s": mb / write_s,
        "read_mb_per_s": mb / read_s,
    }
    reason = "what was read is not what was written" if changed else ""
    context.tell("fault" if changed else "ok", figures, reason)


def _piece(seed: bytes, number: int) -> bytes:
    """Return bytes that no SSD has met: one that compresses finds nothing."""
    return random.Random(seed + number.to_bytes(4)).randbytes(PIECE_BYTES)


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


def _bypass_cache(handle: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(handle, F_NOCACHE, 1)
    else:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
