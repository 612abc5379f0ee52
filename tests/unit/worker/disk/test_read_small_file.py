"""Puts whatever the file system knows in the place of the small files that the server reads."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hearth.shared.private_files import read_small_file


def as_fifo(path: Path) -> None:
    os.mkfifo(path)


def as_directory(path: Path) -> None:
    path.mkdir()


def as_link(path: Path) -> None:
    (path.parent / "elsewhere").write_text("1 2")
    path.symlink_to(path.parent / "elsewhere")


def as_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def as_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


PLANTED = [as_fifo, as_directory, as_link, as_link_to_itself, as_huge_file]


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_small_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, and 4 are read at most"):
        read_small_file(path, 4)


def test_another_users_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1")
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(OSError, match="another user's"):
        read_small_file(path, 5)


@pytest.mark.parametrize("plant", PLANTED)
def test_whatever_lies_in_the_place_of_a_file_is_refused_at_once(
    plant: Callable[[Path], None], tmp_path: Path
) -> None:
    plant(tmp_path / "file")
    with pytest.raises(OSError):
        read_small_file(tmp_path / "file", 1_000)
