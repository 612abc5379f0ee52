"""What workers get so that glibc gives memory back."""

import sys

import pytest

from shared.malloc import malloc_environment


def test_linux_workers_map_large_blocks_unless_somebody_has_set_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    added = malloc_environment({"MALLOC_ARENA_MAX": "7"})
    assert list(added) == ["MALLOC_MMAP_THRESHOLD_"]
    assert 64 * 1024 <= int(added["MALLOC_MMAP_THRESHOLD_"]) <= 4 * 1024 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert malloc_environment({}) == {}
