"""Checks that a day's writing is bounded, keeps its reserve, and that a put is cheap."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from hearth.worker.disk.file_format import encode
from hearth.worker.disk.file_store import FileStore
from tests.helpers.records.disk_records import ROOT, chain, record

DAY_S = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


def file_store_in(directory: Path, per_day: int = 0, **more: Any) -> FileStore:
    return FileStore(directory, ROOT, 100 << 20, per_day, **more)


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
    clock.now_s += DAY_S
    assert not again.is_reserved and again.report()["write_bytes_left"] == 4 * size
    assert again.put(record(5)) and again.report()["bytes_written_today"] == size


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
