"""Jobs of the I/O thread that wait until nothing is read or written."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.worker.disk import disk_thread as module
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import Record
from hearth.worker.disk.file_names import FileName
from hearth.worker.disk.file_store import FileStore
from tests.helpers.records.disk_records import ROOT, chain, record

WAIT_S = 60.0


class Noting(FileStore):
    """A file store that waits at its first job until `gate` opens, and notes what it does."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ROOT, 100 << 20, 0)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.done: list[str] = []

    def put(self, record: Record, is_needed: bool = False) -> bool:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.done.append("put")
        return super().put(record, is_needed)

    def get(self, name: FileName) -> Record | None:
        self.done.append("get")
        return super().get(name)


@pytest.fixture
def store(tmp_path: Path) -> Noting:
    return Noting(tmp_path)


@pytest.fixture
def disk(store: Noting) -> Iterator[DiskThread]:
    made = DiskThread(store)
    yield made
    store.gate.set()
    made.close()


def test_a_job_waits_for_all_reads_and_writes_that_came_before_it_was_done(
    store: Noting, disk: DiskThread
) -> None:
    one, two = chain(2)
    disk.write(one)
    assert store.entered.wait(WAIT_S)
    over = threading.Event()
    assert disk.later(lambda: store.done.append("job")) and disk.later(over.set)
    disk.write(two)
    disk.read([one.name], lambda records: None)
    store.gate.set()
    assert over.wait(WAIT_S)
    assert store.done == ["put", "get", "put", "job"]


def test_a_job_that_fails_is_counted_and_the_next_one_is_done(
    store: Noting, disk: DiskThread, caplog: pytest.LogCaptureFixture
) -> None:
    over = threading.Event()
    disk.later(lambda: 1 / 0)
    disk.later(over.set)
    assert over.wait(WAIT_S)
    assert disk.counts["jobs_failed"] == 1 and "ZeroDivisionError" in caplog.text


def test_more_jobs_than_may_wait_are_refused_and_none_is_done_at_the_end(
    store: Noting, disk: DiskThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LATER_MAX", 2)
    disk.write(record())
    assert store.entered.wait(WAIT_S)
    jobs = [disk.later(lambda: store.done.append("job")) for _ in range(3)]
    assert jobs == [True, True, False]
    assert disk.counts["later_refused_queue"] == 1
    closing = threading.Thread(target=disk.close)
    closing.start()
    store.gate.set()
    closing.join(WAIT_S)
    assert "job" not in store.done and not disk.later(lambda: None)
