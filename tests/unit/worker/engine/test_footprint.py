"""Measures this process, and what is beside arrays whose sizes are made up."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hearth.worker.engine import footprint
from hearth.worker.engine.footprint import MEASURES_MAX, OVERHEAD_MAX, MemoryUse, process_bytes

MB = 1024 * 1024


@pytest.mark.parametrize("content", [None, "", "12", "a b"])
def test_a_system_that_does_not_say_counts_nothing(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "statm"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(footprint, "_STATM", path)
    assert process_bytes() == 0


def test_macos_tells_the_footprint_of_this_very_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in writes struct rusage_info_v2, field by field as sys/resource.h has them."""
    fields = "uuid uuid user_time system_time pkg_idle_wkups interrupt_wkups pageins wired_size"
    names = [*fields.split(), "resident_size", "phys_footprint", "proc_start_abstime"]
    asked: list[tuple[int, int]] = []

    class Libc:
        def proc_pid_rusage(self, pid: int, flavor: int, buffer: Any) -> int:
            asked.append((pid, flavor))
            words = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_uint64))
            for index, name in enumerate(names):
                words[index] = 700 * MB if name == "phys_footprint" else index
            return failed

    failed = 0
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Libc())
    assert process_bytes() == 700 * MB
    assert asked == [(os.getpid(), 2)]
    failed = -1
    assert process_bytes() == 0


def test_what_is_beside_the_arrays_counts_once() -> None:
    sizes = {"process": 1_000, "arrays": 600, "freed": 100}
    use = MemoryUse(*(lambda name=name: sizes[name] for name in sizes))
    assert (use.process_bytes, use.beside_bytes, use.bytes_used()) == (1_000, 300, 900)
    sizes["arrays"] = 200  # what went counts no more, before the system is asked again
    assert use.bytes_used() == 500
    sizes["process"] = 550
    use.measure()
    assert (use.process_bytes, use.beside_bytes, use.bytes_used()) == (550, 250, 450)
    sizes["process"] = 900  # grown, perhaps by what went just now and is not noticed yet
    use.measure()
    assert use.beside_bytes == 250
    for _ in range(MEASURES_MAX):
        use.measure()
    assert use.beside_bytes == 600 and use.overhead == OVERHEAD_MAX
    sizes["process"] = 100  # a GPU's own memory is in no process's
    use.measure()
    assert use.bytes_used() == 200
