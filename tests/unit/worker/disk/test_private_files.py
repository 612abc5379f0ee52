"""Checks that another user of the machine can neither read kept KV nor plant any."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.shared.errors import StartError
from hearth.shared.settings import load_settings
from hearth.worker.disk import open_file_store as module
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_store import FileStore
from hearth.worker.disk.open_file_store import open_file_store
from tests.helpers.records.disk_records import ROOT, record


@pytest.fixture
def umask_000() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_and_close(directory: Path) -> None:
    """Open `directory` as a worker does that starts, and close it."""
    file_store = open_file_store(ROOT, load_settings({"KV_CACHE_DIR": str(directory)}, None), "")
    assert file_store is not None
    DiskThread(file_store).close()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_kv_that_another_user_has_planted_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns the directory can put KV there that says whatever they like."""
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(StartError, match=r"belongs to user .* Set KV_CACHE_DIR"):
        open_and_close(tmp_path)


def test_a_worker_that_starts_has_its_directory_left_out_of_backups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    excluded: list[Path] = []
    monkeypatch.setattr(module, "exclude_from_backup", excluded.append)
    open_and_close(tmp_path / "kv")
    assert excluded == [tmp_path / "kv"]
    assert open_file_store(ROOT, load_settings({"MAX_KV_SIZE_GB": "0"}, None), "") is None
    assert len(excluded) == 1, "nothing is written, so that nothing is made"


@pytest.mark.parametrize("open_to", [0o777, 0o755, 0o701])
def test_a_directory_that_others_can_enter_is_closed_to_them(tmp_path: Path, open_to: int) -> None:
    tmp_path.chmod(open_to)
    open_and_close(tmp_path)
    assert mode(tmp_path) == 0o700


def test_a_link_to_another_disk_is_followed_and_what_it_leads_to_is_closed(tmp_path: Path) -> None:
    there, link = tmp_path / "disk", tmp_path / "kv"
    there.mkdir(mode=0o755)
    link.symlink_to(there)
    open_and_close(link)
    assert mode(there) == 0o700


def test_a_directory_that_is_read_only_stays_so_and_is_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    open_and_close(tmp_path)
    assert mode(tmp_path) == 0o500
    tmp_path.chmod(0o700)


def test_all_that_leads_to_kept_kv_is_private_also_under_umask_000(
    tmp_path: Path, umask_000: None
) -> None:
    file_store = FileStore(tmp_path / "new" / "kv", ROOT, 1 << 30, 0)
    assert file_store.put(record())
    modes = {path: mode(path) for path in (tmp_path / "new", *(tmp_path / "new").rglob("*"))}
    assert len(modes) == 5
    for path, found in modes.items():
        assert found == (0o700 if path.is_dir() else 0o600), path
