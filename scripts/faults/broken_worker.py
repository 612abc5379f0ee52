"""Runs the workers of a chaos run: real ones that are short of memory, or on a slow disk.

PRESSURE_FILE says how short of memory the system is; while SLOW_DISK_FILE is there, each file of KV
takes DISK_S longer to write and to read.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any, Final
from unittest import mock

from hearth.worker.disk import file_format, file_store
from scripts.harness.mac import pressed_worker

SLOW_DISK_FILE: Final = "SLOW_DISK_FILE"
DISK_S: Final = 1.0


def slowed(name: str) -> Any:
    """Return the function `name` of a disk that is as slow as the file says."""

    def play(*arguments: Any) -> Any:
        time.sleep(DISK_S * Path(os.environ[SLOW_DISK_FILE]).exists())
        return getattr(file_format, name)(*arguments)

    return mock.patch.object(file_store, name, play)


if __name__ == "__main__":
    with slowed("write"), slowed("read"):
        code = pressed_worker.main()
    sys.stderr.flush()
    os._exit(code)  # daemon threads that use MLX must not outlive the interpreter
