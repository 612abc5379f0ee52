"""Runs the workers of a chaos run: real ones that are short of memory, or on a slow disk.

The file PRESSURE_FILE has the system's level of memory by name; the process is said to take 15 %
more than what MLX counts, beside the libraries that every worker loads. While SLOW_DISK_FILE is
there, each file of KV takes a second longer to write and to read.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

from hearth.worker import main as real
from hearth.worker.disk import file_format, file_store
from hearth.worker.engine.system_state import MemoryUse, Pressure
from hearth.worker.setup import memory_setup


def slowed(name: str) -> Any:
    """Replace the function `name` by one of a disk that is as slow as the file says."""

    def play(*arguments: Any) -> Any:
        time.sleep(1.0 * Path(os.environ["SLOW_DISK_FILE"]).exists())
        return getattr(file_format, name)(*arguments)

    return mock.patch.object(file_store, name, play)


def process_bytes() -> int:
    return (600 << 20) + int(1.15 * (mx.get_active_memory() + mx.get_cache_memory()))


def level() -> Pressure:
    """Return what the file says; a file that is not there, or half written, says nothing."""
    try:
        return Pressure[Path(os.environ["PRESSURE_FILE"]).read_text().strip()]
    except (OSError, KeyError):
        return Pressure.NORMAL


if __name__ == "__main__":
    with (
        slowed("write"),
        slowed("read"),
        mock.patch.object(memory_setup, "system_pressure", level),
        mock.patch.object(memory_setup, "MemoryUse", partial(MemoryUse, process_bytes)),
    ):
        code = real.main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
