"""By default kept KV has a tenth of its volume, as far as that is free."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.disk.open_file_store import GB, disk_bytes_max, open_file_store
from tests.helpers.records.disk_records import ROOT

DISKS = [
    # GB of the volume, GB of it that are free, GB that kept KV may take
    (8_000, 6_000, 800),
    (1_000, 900, 100),
    (1_000, 150, 75),
    (500, 30, 15),
    (500, 12, 10),
    (60, 40, 10),
]


@pytest.mark.parametrize(("total", "free", "wanted"), DISKS)
def test_kept_kv_follows_the_volume_by_default(
    total: int, free: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(total=total * GB, free=free * GB)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    directory = tmp_path / "not" / "made" / "yet"
    settings = load_settings({"KV_CACHE_DIR": str(directory)}, None)
    assert disk_bytes_max(settings) == wanted * GB
    assert asked == [tmp_path.resolve()], "the volume of a directory that is made later"


@pytest.mark.parametrize("gigabytes", [1, 10, 500])
def test_a_number_that_is_set_is_what_it_takes(gigabytes: int) -> None:
    settings = load_settings({"MAX_KV_SIZE_GB": str(gigabytes)}, None)
    assert disk_bytes_max(settings) == gigabytes * GB


def test_what_is_neither_a_number_nor_auto_is_told_with_what_may_be() -> None:
    with pytest.raises(StartError, match="auto, or a whole number from 0 to 10,000"):
        load_settings({"MAX_KV_SIZE_GB": "-1"}, None)


def test_ranks_of_one_machine_have_a_part_each_of_what_is_allowed_there(tmp_path: Path) -> None:
    environ = {"KV_CACHE_DIR": str(tmp_path), "MAX_KV_SIZE_GB": "12"}
    settings = load_settings(environ | {"KV_DISK_WRITE_GB_PER_DAY": "6"}, None)
    store = open_file_store(ROOT, settings, "", ranks_here=3)
    assert store is not None
    report = store.report()
    assert (report["bytes_max"], report["write_bytes_per_day"]) == (4 * GB, 2 * GB)
