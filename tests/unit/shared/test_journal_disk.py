"""Checks what a journal loses to a failing disk, a full queue and a killed writer."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hearth.shared import durable_journal as journals
from hearth.shared.durable_journal import NullJournalWriter, open_journal_writer
from tests.helpers.records.journal_records import SCHEMA, WAIT_S, Notes, held, opened, put, wrote

pytestmark = pytest.mark.process


class Disk:
    """`os.write` of a disk that can be made full, or hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error = 0
        self.is_reached = threading.Event()  # by a write
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._write = os.write
        monkeypatch.setattr(journals.os, "write", self)

    def __call__(self, handle: int, data: Any) -> int:
        self.is_reached.set()
        assert self.goes_on.wait(WAIT_S)
        if self.error:
            self._write(handle, bytes(data[: len(data) // 2]))
            raise OSError(self.error, os.strerror(self.error))
        return self._write(handle, data)


def file_bytes(home: Path) -> int:
    return sum(path.stat().st_size for path in home.glob("*.journal"))


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_costs_records_until_it_is_well(
    home: Path,
    error: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_eager: None,
) -> None:
    notes = Notes()
    scribe, _ = opened(home, notes)
    disk = Disk(monkeypatch)
    whole_bytes = 0
    for number in range(6):
        disk.error = error if number in (2, 3) else 0
        notes.kept.append(number)
        put(scribe, number)
        if disk.error:
            assert file_bytes(home) == whole_bytes, "what was torn is taken back"
        elif number < 2:
            whole_bytes = file_bytes(home)
    scribe.close()
    assert scribe.report()["not_written"] == 2 and scribe.report()["not_rewritten"] == 2
    assert notes.losses >= 2
    assert len(caplog.records) == 2, "one warning a kind"
    assert all(str(home) in record.message for record in caplog.records)
    assert held(home) == [0, 1, 2, 3, 4, 5]
    assert not list(home.glob(".writing-*"))


def test_nothing_is_built_on_what_a_disk_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = Notes()
    scribe, _ = opened(home, notes)
    disk = Disk(monkeypatch)
    losses = []
    for error in (errno.EIO, 0, errno.EIO):
        disk.error = error
        put(scribe, "x")
        losses.append(notes.losses)
    scribe.close()
    assert scribe.report()["not_rewritten"] == 1, "the next attempt waits"
    assert losses[0] < losses[2] == losses[1] + 1


def test_a_directory_that_somebody_removed_comes_back_whole(home: Path, is_eager: None) -> None:
    notes = Notes()
    scribe, _ = opened(home, notes)
    for number in range(3):
        notes.kept.append(number)
        put(scribe, number)
        if number == 1:
            for path in home.iterdir():
                path.unlink()
            home.rmdir()
    scribe.close()
    assert held(home) == [0, 1, 2]


@pytest.mark.parametrize("limit", ["QUEUE_BYTES_MAX", "QUEUE_ITEMS_MAX"])
def test_a_queue_that_is_full_drops_and_counts_and_is_made_good(
    home: Path, limit: str, monkeypatch: pytest.MonkeyPatch, is_eager: None
) -> None:
    monkeypatch.setattr(journals, limit, 2)
    notes = Notes()
    scribe, _ = opened(home, notes)
    disk = Disk(monkeypatch)
    disk.goes_on.clear()
    for number in range(6):  # the first one hangs in the disk
        notes.kept.append(number)
        scribe.put(number, 1)
        assert disk.is_reached.wait(WAIT_S)
    disk.goes_on.set()
    assert scribe.flush(WAIT_S)
    assert scribe.report()["dropped"] == 3
    scribe.close()
    assert held(home) == [0, 1, 2, 3, 4, 5, 1, 2], "the two that waited are written again"


def test_a_directory_that_cannot_be_used_costs_the_memory_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv").write_text("a file")
    scribe = open_journal_writer(tmp_path / "kv" / "notes-0", Notes(), SCHEMA)
    assert isinstance(scribe, NullJournalWriter)
    scribe.put("a", 1)
    scribe.close()
    assert len(caplog.records) == 1 and list(scribe.read()) == []


def test_a_file_of_the_largest_size_is_not_appended_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "FILE_BYTES_MAX", 100)
    assert wrote(home, "a", "b" * 200)["not_written"] == 2
    assert wrote(home, "c")["written"] == 1


CHILD = """
import sys
import threading
from pathlib import Path
from hearth.shared import durable_journal as journal
from tests.helpers.records.journal_records import Notes, opened
journal.REWRITE_BYTES_MIN, journal.RETRY_S = 20_000, 0.0
notes = Notes()
writer, notes.kept = opened(Path(sys.argv[1]), notes)
number = max(notes.kept, default=[-1])[0]
print("began", number, dict(writer.report()).get("damaged", 0), flush=True)
while True:
    number += 1
    item = [number, "x" * (number * 37 % 3_000)]
    notes.kept = [*notes.kept[-19:], item]
    writer.put(item, 1)
    if number % 3 == 0:
        assert writer.flush(5.0)
    print(number, flush=True)
"""


@pytest.mark.parametrize("lives", [5, pytest.param(20, marks=pytest.mark.night)])
def test_of_a_writer_that_is_killed_nothing_that_was_written_is_lost(
    home: Path, lives: int
) -> None:
    """What was told as flushed is there, in the midst of rewriting too."""
    told, rewritten = -1, 0
    for life in range(lives):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(home)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        word, begun, damaged = child.stdout.readline().split()
        assert word == "began" and int(damaged) <= 1
        assert int(begun) >= told - 3, "at most what waited is lost"
        for _ in range(30 + 17 * life):
            told = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().splitlines()
        complete = [int(line) for line in rest if line.isdigit()]
        told = max([told, *complete[:-1]])
        child.wait()
        child.stdout.close()
        records = held(home)
        numbers = [row[0] for row in records]
        assert max(numbers) >= told - told % 3 - 3
        kept = sorted(set(numbers))[-20:]  # some stand there twice: amid a rewrite they are put
        assert kept == list(range(kept[0], kept[0] + len(kept)))
        assert all(text == "x" * (number * 37 % 3_000) for number, text in records)
        rewritten += len(numbers) < max(numbers)
    assert rewritten > lives // 4, rewritten
