"""Checks what keeps the KV directory out of a Mac's backups and search, by a call that notes."""

import errno
import os
import stat
from pathlib import Path

import pytest

from hearth.worker.disk.open_file_store import (
    ATTRIBUTE,
    EXCLUDED,
    NEVER_INDEX,
    exclude_from_backup,
    set_attribute,
)

Call = tuple[Path, str, bytes]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_is_made_private_and_excluded_each_time(tmp_path: Path) -> None:
    directory, calls = tmp_path / "home" / "kv", []  # type: tuple[Path, list[Call]]
    for _ in range(2):
        exclude_from_backup(directory, "darwin", lambda *call: calls.append(call))
    assert calls == [(directory, ATTRIBUTE, EXCLUDED)] * 2
    assert mode_of(directory) == mode_of(directory.parent) == 0o700
    assert [path.name for path in directory.iterdir()] == [NEVER_INDEX]
    assert mode_of(directory / NEVER_INDEX) == 0o600


def test_elsewhere_nothing_is_made(tmp_path: Path) -> None:
    calls: list[Call] = []
    exclude_from_backup(tmp_path / "kv", "linux", lambda *call: calls.append(call))
    assert not calls and not (tmp_path / "kv").exists()


def test_a_failure_is_told_with_what_helps_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path, name: str, value: bytes) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), str(path))

    exclude_from_backup(tmp_path / "kv", "darwin", refuse)
    (told,) = caplog.messages
    assert "not supported" in told and f"tmutil addexclusion {tmp_path / 'kv'}" in told


def test_the_systems_call_sets_an_attribute_and_tells_its_failure(tmp_path: Path) -> None:
    value = b"with a \x00 byte"
    try:
        set_attribute(tmp_path, "user.hearth-test", value)
    except OSError as error:  # a file system without them
        assert error.errno == errno.ENOTSUP
    else:
        assert os.getxattr(tmp_path, "user.hearth-test") == value
    with pytest.raises(OSError, match="No such file"):
        set_attribute(tmp_path / "nowhere", "user.hearth-test", value)
