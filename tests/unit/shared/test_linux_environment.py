"""Checks the settings by which glibc gives freed memory back, in workers and in this process."""

import subprocess
import sys

import pytest

from hearth.shared.linux_environment import malloc_environment


def test_linux_workers_map_large_blocks_unless_somebody_has_set_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    added = malloc_environment({"MALLOC_ARENA_MAX": "7"})
    assert list(added) == ["MALLOC_MMAP_THRESHOLD_"]
    assert 64 * 1024 <= int(added["MALLOC_MMAP_THRESHOLD_"]) <= 4 * 1024 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert malloc_environment({}) == {}


HELD = """
import re, sys
from pathlib import Path
from hearth.shared.linux_environment import map_large_blocks
if sys.argv[1:]:
    assert map_large_blocks({})
def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
bytes(30 << 20)  # once a large block was freed, glibc takes such from its heap
before, kept = resident(), []
for _ in range(8):
    freed = [b"x" * (2 << 20) for _ in range(4)]
    kept.append(b"x" * (200 << 10))
    del freed
print(resident() - before)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_large_blocks_that_were_freed_go_back_although_small_ones_lie_between() -> None:
    def held(*arguments: str) -> int:
        command = [sys.executable, "-c", HELD, *arguments]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert held("mapped") < 4, "MB"
