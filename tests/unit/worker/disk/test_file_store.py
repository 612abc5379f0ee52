"""The file store: what a restart finds, what is refused, what a bad disk does to it."""

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.worker.cache.block_hash import schema_root
from hearth.worker.disk import file_store as module
from hearth.worker.disk.file_format import TEMP_PREFIX, FileKind, encode
from hearth.worker.disk.file_store import (
    COUNTERS_NAME,
    FILE_BYTES_MIN,
    PAUSE_S,
    FileStore,
    locked_counters,
)
from tests.helpers.records.disk_records import OTHER_ROOT, ROOT, chain, contents, record

MB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


def file_store_in(directory: Path, cap: int = 100 * MB, per_day: int = 0, **more: Any) -> FileStore:
    return FileStore(directory, more.pop("root", ROOT), cap, per_day, **more)


def path_of(directory: Path, one: Any) -> Path:
    return directory / one.root.hex() / one.name.file_name


def temps(directory: Path) -> list[Path]:
    return list(directory.rglob(f"{TEMP_PREFIX}*"))


def used(directory: Path) -> int:
    files = directory.rglob("*.safetensors")
    return sum(max(FILE_BYTES_MIN, path.stat().st_size) for path in files)


# ---------------------------------------------------------------- what is kept is found


def test_a_restart_finds_everything_by_its_names_and_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = chain(5)
    ends = [record(9, before=line[-1], kind=kind) for kind in FileKind]
    before = file_store_in(tmp_path)
    assert all([before.put(one) for one in (*line, *ends)])
    opened: list[Path] = []
    really = os.open

    def watched(path: Path, *how: Any) -> int:
        opened.append(path)
        return really(path, *how)

    with monkeypatch.context() as watch:
        watch.setattr(os, "open", watched)
        after = file_store_in(tmp_path)
        for one in line:
            assert after.at(one.end) == [one.name] and one.name in after.leaving(one.start)
        assert [name.kind for name in after.at(ends[0].end)] == list(FileKind)
        assert after.bytes_used == before.bytes_used and after.report()["files"] == 8
    assert {path.name for path in opened} == {COUNTERS_NAME}
    for one in (*line, *ends):
        found = after.get(one.name)
        assert found is not None and contents(found) == contents(one)


def test_a_file_put_within_the_clocks_last_tick_is_seen(tmp_path: Path) -> None:
    ours, theirs = file_store_in(tmp_path), file_store_in(tmp_path)
    tick_ns = time.time_ns()
    for one in chain(2):
        assert theirs.put(one)
        os.utime(tmp_path / ROOT.hex(), ns=(tick_ns, tick_ns))
        ours.refresh()
        assert ours.at(one.end) == [one.name]


def test_a_file_that_vanished_is_a_counted_miss_and_can_be_put_again(tmp_path: Path) -> None:
    file_store, one = file_store_in(tmp_path), record(1)
    assert file_store.put(one)
    path_of(tmp_path, one).unlink()
    assert file_store.get(one.name) is None and file_store.counts["reads_gone"] == 1
    assert file_store.at(one.end) == []
    assert file_store.put(one) and file_store.get(one.name) is not None


def test_a_last_use_is_noted_at_most_once_a_minute(tmp_path: Path) -> None:
    file_store, one = file_store_in(tmp_path), record(1)
    assert file_store.put(one)
    path, now = path_of(tmp_path, one), time.time()
    for age_s, is_noted in ((30, False), (90, True)):
        os.utime(path, (now - age_s, now - age_s))
        assert file_store.get(one.name) is not None
        assert (path.stat().st_mtime > now - age_s + 1) == is_noted


def test_a_file_that_another_worker_wrote_is_used_by_whoever_would_write_it(tmp_path: Path) -> None:
    ours, one = file_store_in(tmp_path), record(1)
    assert file_store_in(tmp_path).put(one)
    path, now = path_of(tmp_path, one), time.time()
    os.utime(path, (now - 9_999, now - 9_999))
    assert ours.put(one) and ours.counts["writes_known"] == 1
    assert path.stat().st_mtime > now - 60


# ---------------------------------------------------------------- limits


def test_the_cap_holds_over_all_roots_and_the_least_worth_goes(tmp_path: Path) -> None:
    cap = 10 * FILE_BYTES_MIN
    theirs = file_store_in(tmp_path, cap, root=OTHER_ROOT)
    old = chain(4, root=OTHER_ROOT)
    for one in old:
        assert theirs.put(one)
        os.utime(path_of(tmp_path, one), (0, 0))
    ours = file_store_in(tmp_path, cap)
    line = chain(7, 50)
    for one in line:
        assert ours.put(one)
        assert len(list(tmp_path.rglob("*.safetensors"))) <= 10
    theirs.refresh()
    assert [bool(theirs.at(one.end)) for one in old] == [True, True, False, False]
    assert all([ours.at(one.end) for one in line])
    assert ours.counts["evictions"] == 2


def test_what_a_new_file_hangs_from_is_not_swept_to_make_room_for_it(tmp_path: Path) -> None:
    file_store = file_store_in(tmp_path, 10 * FILE_BYTES_MIN)
    parent, *others = [record(number) for number in range(10)]
    for one in (parent, *others):
        assert file_store.put(one)
        age_s = 9e5 if one is parent else 9e4
        os.utime(path_of(tmp_path, one), (time.time() - age_s,) * 2)
    assert file_store.put(record(90, before=parent)) and file_store.counts["evictions"] == 2
    assert file_store.at(parent.end) == [parent.name]


def test_a_record_larger_than_the_cap_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    file_store = file_store_in(tmp_path, 2 * FILE_BYTES_MIN)
    assert file_store.put(record(1)) and not file_store.put(record(2, 1 * MB))
    assert (
        file_store.counts["writes_refused_size"] == 1 and len(list(tmp_path.rglob("*.safe*"))) == 1
    )


@pytest.mark.parametrize("text", [b"{}", b"[1]", b"\xff" * 256, b'{"day":1e9}', b"[" * 256])
def test_a_damaged_ledger_is_counted_and_made_anew(tmp_path: Path, text: bytes) -> None:
    file_store = file_store_in(tmp_path)
    assert file_store.put(record(1))
    (tmp_path / COUNTERS_NAME).write_bytes(text)
    assert file_store.put(record(2)) and file_store.counts["ledgers_damaged"] == 1
    assert file_store.report()["directory_bytes_used"] == 2 * FILE_BYTES_MIN
    assert file_store.put(record(3)) and file_store.counts["ledgers_damaged"] == 1


def test_only_our_own_files_are_counted_or_removed(tmp_path: Path) -> None:
    file_store = file_store_in(tmp_path, FILE_BYTES_MIN)
    assert file_store.put(record(1))
    strangers = [tmp_path / "notes.txt", tmp_path / ROOT.hex() / "model.safetensors"]
    for path in strangers:
        path.write_bytes(b"x" * MB)
    (tmp_path / "ab").mkdir()
    assert (
        file_store.put(record(2)) and file_store.report()["directory_bytes_used"] == FILE_BYTES_MIN
    )
    assert all(path.exists() for path in (*strangers, tmp_path / "ab"))


def test_a_sweep_removes_what_dead_writers_left_and_other_models_empty_directories(
    tmp_path: Path,
) -> None:
    file_store = file_store_in(tmp_path)
    assert file_store.put(record(1))
    left = tmp_path / ROOT.hex() / f"{TEMP_PREFIX}dead"
    left.write_bytes(b"half")
    (tmp_path / OTHER_ROOT.hex()).mkdir()
    file_store.sweep()
    assert not left.exists() and not (tmp_path / OTHER_ROOT.hex()).exists()
    assert file_store.counts["temps_removed"] == 1 and file_store.get(record(1).name) is not None


# ---------------------------------------------------------------- bad disks


def test_a_lock_that_is_never_freed_stops_writes_for_a_while_and_no_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOCK_WAIT_S_MAX", 0.05)
    clock = Clock()
    file_store = file_store_in(tmp_path, now=clock)
    assert file_store.put(record(1))
    with locked_counters(tmp_path, 1.0):
        assert not file_store.put(record(2)) and not file_store.put(record(2))
        assert file_store.get(record(1).name) is not None
    assert (
        file_store.counts["writes_refused_busy"] == file_store.counts["writes_refused_paused"] == 1
    )
    assert len(caplog.records) == 1
    clock.now_s += PAUSE_S
    assert file_store.put(record(2))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of 2 MB of its own, where this machine lets us mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no disk can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.process
def test_a_full_disk_gives_room_back_once_then_stops_writes_and_goes_on_later(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    file_store = file_store_in(small_disk, now=clock)
    line = chain(40, nbytes=MB // 10)
    taken = [file_store.put(one) for one in line]
    assert all(taken) and file_store.counts["evictions"] >= 2, "it made room in its own files"
    assert file_store.report()["directory_bytes_used"] == used(small_disk)
    big = small_disk / "somebody's"
    with pytest.raises(OSError), big.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    clock.now_s += PAUSE_S
    before = file_store.counts["evictions"]
    refused = record(90, MB)
    assert not file_store.put(refused) and not file_store.put(refused)
    assert (
        file_store.counts["writes_refused_full"] >= 1
        and file_store.counts["writes_refused_paused"] >= 1
    )
    assert not temps(small_disk), "nothing half done stays"
    clock.now_s += PAUSE_S
    swept = file_store.counts["evictions"]
    assert not file_store.put(refused) and file_store.counts["evictions"] == swept >= before, (
        "swept once"
    )
    for name in [name for one in line for name in file_store.at(one.end)]:
        assert file_store.get(name) is not None
    assert len(caplog.records) == 1
    big.unlink()
    clock.now_s += PAUSE_S
    assert file_store.put(refused) and file_store.get(refused.name) is not None
    assert file_store.report()["directory_bytes_used"] == used(small_disk), (
        "refused ones count nothing"
    )


def test_a_disk_that_stays_full_takes_from_the_cache_once_until_a_write_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    clock = Clock()
    file_store = file_store_in(tmp_path, MB, now=clock)
    assert all([file_store.put(one) for one in chain(12)])
    for evicted in (2, 4):  # the room of two files
        with monkeypatch.context() as disk:
            disk.setattr(module, "write", full)
            for _ in range(3):
                assert not file_store.put(record(99))
                clock.now_s += PAUSE_S
        assert file_store.counts["evictions"] == evicted
        assert file_store.put(record(99 + evicted))


@pytest.mark.process
def test_a_read_only_disk_is_read_and_warns_once(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, rotten = record(1), record(2)
    file_store = file_store_in(small_disk)
    assert file_store.put(one) and file_store.put(rotten)
    path = path_of(small_disk, rotten)
    path.write_bytes(path.read_bytes()[:-1])
    os.utime(path_of(small_disk, one), (0, 0))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    clock = Clock()
    file_store = file_store_in(small_disk, now=clock)
    for _ in range(3):
        assert not file_store.put(record(3))
        clock.now_s += PAUSE_S
        found = file_store.get(one.name)
        assert found is not None and contents(found) == contents(one)
    assert file_store.counts["writes_refused_read_only"] == 3 and len(caplog.records) == 1
    assert file_store.counts["touches_failed"] == 3
    assert file_store.get(rotten.name) is None and file_store.counts["removals_failed"] == 1
    file_store.refresh()
    assert file_store.at(rotten.end) == [], "it is not offered again"


def test_a_directory_that_may_not_be_made_or_written_is_a_miss_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "refused", str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    file_store = file_store_in(tmp_path / "kv")
    assert not file_store.put(record(1)) and file_store.get(record(1).name) is None
    file_store.sweep()
    assert (
        file_store.counts["writes_refused_read_only"] == 2 and file_store.counts["reads_gone"] == 1
    )
    assert len(caplog.records) == 1


def test_a_disk_that_fails_to_sync_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", failing)
    file_store = file_store_in(tmp_path, per_day=MB)
    assert not file_store.put(record(1)) and not file_store.holds(record(1).name)
    assert not temps(tmp_path) and not list(tmp_path.rglob("*.safetensors"))
    assert (
        file_store.report()["bytes_written_today"]
        == file_store.report()["directory_bytes_used"]
        == 0
    )


def test_a_directory_that_is_removed_amid_work_is_made_again(tmp_path: Path) -> None:
    file_store, one = file_store_in(tmp_path / "kv"), record(1)
    assert file_store.put(one)
    for path in (path_of(tmp_path / "kv", one), tmp_path / "kv" / ROOT.hex()):
        path.unlink() if path.is_file() else path.rmdir()
    (tmp_path / "kv" / COUNTERS_NAME).unlink()
    assert file_store.get(one.name) is None and file_store.put(record(2)) and file_store.put(one)
    assert file_store.get(one.name) is not None and file_store.report()["files"] == 2


def test_clearing_removes_this_models_files_and_leaves_those_of_others(tmp_path: Path) -> None:
    mine, other = file_store_in(tmp_path), file_store_in(tmp_path, root=OTHER_ROOT)
    line, theirs = chain(4), record(7, root=OTHER_ROOT)
    assert all([mine.put(one) for one in line[:2]]) and other.put(theirs)
    assert all([file_store_in(tmp_path).put(one) for one in line[2:]])  # another worker's
    mine.clear()
    assert not list((tmp_path / ROOT.hex()).glob("*.safetensors"))
    assert mine.report()["files"] == 0 and mine.leaving(ROOT) == []
    assert mine.report()["directory_bytes_used"] == used(tmp_path) == FILE_BYTES_MIN
    assert other.get(theirs.name) is not None
    assert mine.put(line[0]) and mine.get(line[0].name) is not None


# ---------------------------------------------------------------- upgrades


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


# ---------------------------------------------------------------- the day's budget

DAY_S = 86_400.0


def test_the_days_budget_is_shared_by_workers_survives_them_and_ends_with_the_day(
    tmp_path: Path,
) -> None:
    clock = Clock()
    size = sum(map(len, encode(record(1))))
    one, two = (file_store_in(tmp_path, per_day=4 * size, now=clock) for _ in range(2))
    assert one.put(record(1)) and two.put(record(2)) and not one.is_reserved
    assert one.put(record(3)) and one.is_reserved
    assert not one.put(record(4)) and not two.put(record(4))
    again = file_store_in(tmp_path, per_day=4 * size, now=clock)
    assert not again.put(record(4)) and again.counts["writes_refused_budget"] == 1
    assert again.put(record(1)), "what is there costs nothing"
    assert again.report()["bytes_written_today"] == 3 * size
    told = [each.report() for each in (one, two, again)]
    assert [each["write_bytes_left"] for each in told] == [size] * 3, "one budget, told alike"
    assert file_store_in(tmp_path, now=clock).report()["write_bytes_left"] is None, "no limit"
    assert again.put(record(4), is_needed=True), "a quarter is for what is needed"
    assert not again.put(record(5), is_needed=True) and again.counts["writes_refused_budget"] == 2
    for number, days in ((5, -1), (6, 2)):  # the clock is put back, and on
        clock.now_s += days * DAY_S
        assert not again.is_reserved and again.report()["write_bytes_left"] == 4 * size
        assert again.put(record(number)) and again.report()["bytes_written_today"] == size


def test_a_put_lists_no_directory_and_a_look_only_what_others_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = file_store_in(tmp_path), file_store_in(tmp_path)
    assert one.put(record(1)) and other.put(record(2))
    one.refresh()
    listed: list[Path] = []
    really = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or really(path))
    assert all(one.put(each) for each in chain(5, seed=10))
    one.refresh()
    assert not listed
    assert other.put(record(3)) and one.put(record(3)) and one.counts["writes_known"] == 1
    assert not listed
    one.refresh()
    assert one.holds(record(3).name) and len(listed) == 1
    (tmp_path / ROOT.hex() / record(3).name.file_name).unlink()
    one.refresh()
    assert not one.holds(record(3).name), "what somebody removed by hand is noticed"
