"""Runs a real worker on a system that is short of memory: as a file says, and its process grows.

The file PRESSURE_FILE has the system's level by name. The process is said to take 15 % more than
what MLX counts, beside the libraries that every worker loads.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Final
from unittest import mock

import mlx.core as mx

from hearth.worker.engine.footprint import MemoryUse
from hearth.worker.engine.memory_pressure import Pressure

MORE: Final = 1.15
LIBRARIES_BYTES: Final = 600 * 1024 * 1024
FILE: Final = "PRESSURE_FILE"
SETUP: Final = "hearth.worker.setup.memory_setup"


def process_bytes() -> int:
    return LIBRARIES_BYTES + int(MORE * (mx.get_active_memory() + mx.get_cache_memory()))


def level_of(path: Path) -> Pressure:
    """Return what the file says; a file that is not there, or half written, says nothing."""
    try:
        return Pressure[path.read_text().strip()]
    except (OSError, KeyError):
        return Pressure.NORMAL


def main() -> int:
    level = partial(level_of, Path(os.environ[FILE]))
    use = partial(MemoryUse, process_bytes)
    with mock.patch(f"{SETUP}.system_pressure", level), mock.patch(f"{SETUP}.MemoryUse", use):
        from hearth.worker import main as real  # only now: its modules take what they need by name

        return real.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
