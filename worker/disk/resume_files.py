"""Finds on disk all that it takes to go on behind a prefix, and reads a file piece by piece."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hearth.worker.cache.block_hash import PrefixHash
from hearth.worker.cache.extent_store import Layout
from hearth.worker.disk.file_names import FileKind, FileName
from hearth.worker.disk.file_store import FileStore

RUNS_MAX: Final = 4096  # that lead to a prefix


def resume_files(
    store: FileStore, layout: Layout, root: PrefixHash, end: PrefixHash
) -> list[FileName]:
    """Return the files to go on from behind `end`, rows first; [] where some are not on disk.

    `root` is the empty prefix that the runs begin with. Any thread; opens no file.
    """
    path: list[FileName] = []
    at = end
    while at != root:
        run = next((name for name in store.at(at) if name.kind is FileKind.ROWS), None)
        if run is None or len(path) == RUNS_MAX:
            return []
        if not path and layout.has_state and _beside(store, run, FileKind.STATE) is None:
            return []  # as of most prefixes: found before thousands of runs are
        path.append(run)
        at = run.start
    path.reverse()
    wanted = [(run, FileKind.WINDOW) for run in _last(path, layout.window)]
    if layout.has_state:
        wanted += [(run, FileKind.STATE) for run in path[-1:]]
    beside = [_beside(store, run, kind) for run, kind in wanted]
    found = [name for name in beside if name is not None]
    return [*path, *found] if len(found) == len(beside) else []


def _last(path: Sequence[FileName], tokens: int) -> list[FileName]:
    """Return the runs of the last `tokens` tokens of a path, in order."""
    found: list[FileName] = []
    for run in reversed(path):
        if tokens <= 0:
            break
        found.append(run)
        tokens -= run.token_count
    return found[::-1]


def _beside(store: FileStore, run: FileName, kind: FileKind) -> FileName | None:
    there = (name for name in store.at(run.end) if name.kind is kind and name.start == run.start)
    return next(there, None)


def size_of(path: Path) -> int:
    """Return a file's size in bytes, 0 where it cannot be told."""
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


def part_of(path: Path, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` of a file from `offset` on, fewer at its end; b"" where it has none there."""
    assert offset >= 0 and nbytes > 0, (offset, nbytes)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.pread(handle, nbytes, offset)
    except OSError:
        return b""
    finally:
        os.close(handle)
