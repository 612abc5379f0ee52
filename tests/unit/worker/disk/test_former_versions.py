"""Checks that KV which an upgrade has left behind is the first to go."""

import os
from pathlib import Path
from typing import Any

from hearth.worker.cache.block_hash import schema_root
from hearth.worker.disk.file_store import FILE_BYTES_MIN, FileStore
from tests.helpers.records.disk_records import ROOT, chain


def path_of(directory: Path, one: Any) -> Path:
    return directory / one.root.hex() / one.name.file_name


def test_files_of_a_former_version_go_first_however_lately_they_were_used(tmp_path: Path) -> None:
    """An upgrade names all KV anew: what it leaves behind is nobody's."""
    cap = 10 * FILE_BYTES_MIN
    former, other, today = ROOT, schema_root(["other"]), schema_root(["today"])
    left, kept = chain(4, root=former), chain(4, 50, root=other)
    for one in (*left, *kept):
        assert FileStore(tmp_path, one.root, cap, 0).put(one)
    for one in kept:
        os.utime(path_of(tmp_path, one), (0, 0))
    upgraded = FileStore(tmp_path, today, cap, 0)
    assert all([upgraded.put(one) for one in chain(6, 90, root=today)])
    assert [path_of(tmp_path, one).exists() for one in left] == [False] * 4
    assert all([path_of(tmp_path, one).exists() for one in kept])
