"""The I/O thread: reads before writes, bounded, and never dead."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.worker.disk import disk_thread as module
from hearth.worker.disk.disk_thread import DiskThread, Records
from hearth.worker.disk.file_format import FileName, Record
from hearth.worker.disk.file_store import FileStore
from tests.helpers.records.disk_records import ROOT, chain, contents, record

WAIT_S = 60.0


class Gate(FileStore):
    """A file store whose writes wait until `gate` is open; `done` is what was asked, in order."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ROOT, 100 << 20, 0)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.done: list[str] = []
        self.error: Exception | None = None

    def put(self, record: Record, is_needed: bool = False) -> bool:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.done.append("put")
        if self.error is not None:
            raise self.error
        return super().put(record, is_needed)

    def get(self, name: FileName) -> Record | None:
        self.done.append("get")
        if self.error is not None:
            raise self.error
        return super().get(name)


@pytest.fixture
def file_store(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def disk_thread(file_store: Gate) -> Iterator[DiskThread]:
    disk_thread = DiskThread(file_store, queue_bytes_max=10 * record().nbytes)
    yield disk_thread
    file_store.gate.set()
    disk_thread.close()
    assert not disk_thread.thread.is_alive()


def asked(disk_thread: DiskThread, names: list[FileName]) -> tuple[threading.Event, list[Records]]:
    answered, answers = threading.Event(), []

    def then(records: Records) -> None:
        answers.append(records)
        answered.set()

    assert disk_thread.read(names, then)
    return answered, answers


def test_what_is_written_is_read_in_the_order_asked_with_none_for_what_is_not_there(
    disk_thread: DiskThread, file_store: Gate
) -> None:
    file_store.gate.set()
    line = chain(3)
    assert all([disk_thread.write(one) for one in line]) and disk_thread.flush(WAIT_S)
    names = [line[2].name, record(9).name, line[0].name]
    answered, answers = asked(disk_thread, names)
    assert answered.wait(WAIT_S)
    ((first, none, last),) = answers
    assert first is not None and last is not None and none is None
    assert contents(first) == contents(line[2]) and contents(last) == contents(line[0])


def test_reads_go_before_the_writes_that_wait(disk_thread: DiskThread, file_store: Gate) -> None:
    line = chain(3)
    assert disk_thread.write(line[0]) and file_store.entered.wait(WAIT_S)
    assert disk_thread.write(line[1]) and disk_thread.write(line[2])
    answered, _ = asked(disk_thread, [line[0].name])
    file_store.gate.set()
    assert answered.wait(WAIT_S) and disk_thread.flush(WAIT_S)
    assert file_store.done == ["put", "get", "put", "put"]


def test_the_queue_is_bounded_by_bytes_and_what_does_not_fit_is_counted(
    disk_thread: DiskThread, file_store: Gate
) -> None:
    taken = [disk_thread.write(one) for one in chain(13)]
    assert taken == [True] * 10 + [False] * 3
    assert disk_thread.report()["counts"]["writes_refused_queue"] == 3
    assert disk_thread.report()["queue_bytes"] == 10 * record().nbytes
    file_store.gate.set()
    assert disk_thread.flush(WAIT_S) and disk_thread.report()["queue_bytes"] == 0
    assert file_store.report()["files"] == 10


def test_reads_that_wait_are_bounded(
    disk_thread: DiskThread, file_store: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READS_MAX", 2)
    assert disk_thread.write(record()) and file_store.entered.wait(WAIT_S)
    taken = [disk_thread.read([], lambda _: None) for _ in range(3)]
    assert taken == [True, True, False] and disk_thread.counts["reads_refused_queue"] == 1


def test_a_close_drops_what_is_queued_and_answers_every_read_that_was_taken(
    disk_thread: DiskThread, file_store: Gate
) -> None:
    line = chain(3)
    assert disk_thread.write(line[0]) and file_store.entered.wait(WAIT_S)
    assert disk_thread.write(line[1]) and disk_thread.write(line[2])
    answered, answers = asked(disk_thread, [line[0].name, line[1].name])
    threading.Timer(0.2, file_store.gate.set).start()
    disk_thread.close()
    assert answered.wait(WAIT_S) and answers == [[None, None]]
    assert disk_thread.counts["writes_dropped"] == 2 and file_store.done == ["put"]
    assert not disk_thread.write(line[1]) and not disk_thread.read([], lambda _: None)
    disk_thread.close()  # once more is no harm


def test_a_close_waits_for_a_disk_that_hangs_only_so_long(
    disk_thread: DiskThread, file_store: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_WAIT_S_MAX", 0.1)
    assert disk_thread.write(record()) and file_store.entered.wait(WAIT_S)
    began = time.monotonic()
    disk_thread.close()
    assert time.monotonic() - began < 5.0 and disk_thread.thread.daemon
    monkeypatch.undo()


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OSError("a disk"), MemoryError()])
def test_no_error_ends_the_thread_or_leaves_a_read_unanswered(
    disk_thread: DiskThread, file_store: Gate, error: Exception
) -> None:
    file_store.error = error
    file_store.gate.set()
    assert disk_thread.write(record()) and disk_thread.flush(WAIT_S)
    answered, answers = asked(disk_thread, [record().name])
    assert answered.wait(WAIT_S) and answers == [[None]]

    def broken(_: Any) -> None:
        raise RuntimeError("who asked is broken")

    assert disk_thread.read([], broken)
    file_store.error = None
    assert disk_thread.write(record()) and disk_thread.flush(WAIT_S)
    assert file_store.report()["files"] == 1 and disk_thread.counts["jobs_failed"] == 3


def test_files_of_another_worker_are_found_while_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0.02)
    ours = FileStore(tmp_path, ROOT, 100 << 20, 0)
    disk_thread = DiskThread(ours)
    try:
        assert FileStore(tmp_path, ROOT, 100 << 20, 0).put(record())
        deadline = time.monotonic() + WAIT_S
        while not ours.holds(record().name):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        disk_thread.close()


def test_whoever_looks_finds_what_another_worker_has_just_put_before_all_that_waits(
    disk_thread: DiskThread, file_store: Gate, tmp_path: Path
) -> None:
    theirs, ours = chain(2)
    other = FileStore(tmp_path, ROOT, 100 << 20, 0)
    assert disk_thread.refresh() is None, "nobody else has written here"
    file_store.is_shared = True
    assert disk_thread.write(ours) and file_store.entered.wait(WAIT_S)
    seen = disk_thread.refresh()
    assert seen is not None and not seen.is_set(), "the thread is amid a write"
    assert other.put(theirs) and not file_store.holds(theirs.name)
    file_store.gate.set()
    assert seen.wait(WAIT_S) and file_store.holds(theirs.name)


def test_a_look_that_waits_as_the_thread_ends_is_answered(
    disk_thread: DiskThread, file_store: Gate
) -> None:
    file_store.is_shared = True
    assert disk_thread.write(record()) and file_store.entered.wait(WAIT_S)
    seen = disk_thread.refresh()
    assert seen is not None
    file_store.gate.set()
    disk_thread.close()
    assert seen.is_set() and disk_thread.refresh() is None


def test_what_dead_writers_left_is_swept_at_the_start(tmp_path: Path) -> None:
    file_store = FileStore(tmp_path, ROOT, 100 << 20, 0)
    assert file_store.put(record())
    left = tmp_path / ROOT.hex() / ".writing-dead"
    left.write_bytes(b"half")
    disk_thread = DiskThread(file_store)
    answered, _ = asked(disk_thread, [])
    assert answered.wait(WAIT_S) and not left.exists()
    disk_thread.close()


def test_clearing_drops_what_waits_and_makes_what_was_asked_for_a_miss(
    disk_thread: DiskThread, file_store: Gate
) -> None:
    line = chain(4)
    assert disk_thread.write(line[0]) and file_store.entered.wait(WAIT_S)  # amid its writing
    assert disk_thread.write(line[1])
    answered, answers = asked(disk_thread, [line[0].name, line[1].name])
    disk_thread.clear()
    file_store.gate.set()
    assert answered.wait(WAIT_S) and answers == [[None, None]]
    assert disk_thread.report()["files"] == 0 and disk_thread.report()["queue_bytes"] == 0
    assert disk_thread.write(line[2]) and disk_thread.flush(WAIT_S)
    assert disk_thread.report()["files"] == 1


def test_nothing_is_found_from_the_moment_that_all_is_to_be_removed(
    disk_thread: DiskThread, file_store: Gate
) -> None:
    line = chain(2)
    file_store.gate.set()
    assert disk_thread.write(line[0]) and disk_thread.flush(WAIT_S)
    assert disk_thread.holds(line[0].name) and file_store.leaving(line[0].start)
    file_store.gate.clear()
    file_store.entered.clear()
    assert disk_thread.write(line[1]) and file_store.entered.wait(WAIT_S)  # the thread is busy
    disk_thread.clear()
    assert not disk_thread.holds(line[0].name) and not file_store.leaving(line[0].start)
    assert not file_store.at(line[0].end) and not file_store.nbytes(line[0].name)
    assert disk_thread.write(line[0])  # it is not taken for what is about to go
    file_store.gate.set()
    assert disk_thread.flush(WAIT_S)
    assert disk_thread.holds(line[0].name) and not disk_thread.holds(line[1].name)
    assert disk_thread.report()["files"] == 1


def test_a_file_that_cannot_be_used_is_not_found_at_once_and_can_be_written_anew(
    disk_thread: DiskThread, file_store: Gate
) -> None:
    file_store.gate.set()
    (one,) = chain(1)
    assert disk_thread.write(one) and disk_thread.flush(WAIT_S)
    assert file_store.holds(one.name)
    disk_thread.discard(one.name)
    assert not file_store.holds(one.name) and not file_store.leaving(one.start)
    assert disk_thread.write(one) and disk_thread.flush(WAIT_S)
    assert file_store.done == ["put", "put"]
    assert disk_thread.report()["counts"]["unusable_removed"] == 1
    answered, answers = asked(disk_thread, [one.name])
    assert answered.wait(WAIT_S) and answers[0][0] is not None
    assert disk_thread.report()["files"] == 1
