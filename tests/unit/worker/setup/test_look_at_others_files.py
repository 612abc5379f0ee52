"""Prompts wait for a look at the disk only where other workers write there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_store import FileStore
from hearth.worker.kv.kv_manager import KVManager, NullKVManager
from hearth.worker.setup.kv_setup import disk_scan_of
from scripts.harness.socketless_worker import machine
from tests.helpers.records.disk_records import ROOT, record


@pytest.fixture
def disk_thread(tmp_path: Path) -> Iterator[DiskThread]:
    thread = DiskThread(FileStore(tmp_path, ROOT, 100 << 20, 0))
    yield thread
    thread.close()


def kept_by(disk_thread: DiskThread | None) -> KVManager:
    kept = machine("qwen3", disk_thread=disk_thread, root=ROOT).keeper
    assert isinstance(kept, KVManager)
    return kept


def test_workers_of_one_server_look(disk_thread: DiskThread) -> None:
    seen = disk_scan_of(kept_by(disk_thread), workers=2)()
    assert seen is not None and seen.wait(60)


def test_a_worker_that_is_alone_on_its_server_looks_once_others_have_written(
    disk_thread: DiskThread, tmp_path: Path
) -> None:
    look = disk_scan_of(kept_by(disk_thread), workers=1)
    assert look() is None
    assert FileStore(tmp_path, ROOT, 100 << 20, 0).put(record())
    disk_thread.file_store.refresh()
    seen = look()
    assert seen is not None and seen.wait(60)


def test_nothing_is_looked_at_where_nothing_is_on_disk() -> None:
    assert disk_scan_of(NullKVManager(list), workers=2)() is None
    assert disk_scan_of(kept_by(None), workers=2)() is None
    assert disk_scan_of(None, workers=2)() is None
