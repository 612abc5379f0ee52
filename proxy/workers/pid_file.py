"""Writes `<instance_dir>/hearth.json`, which names our processes for a later start."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from hearth.shared.processes import process_started

PID_FILE_NAME: Final = "hearth.json"


class PidFile:
    """Names this server's processes, each with its start time, since pids are reused."""

    def __init__(self, directory: Path, host: str, port: int) -> None:
        self.path = directory / PID_FILE_NAME
        self._host = host
        self._port = port
        self._rows: dict[int, dict[str, Any]] = {}  # pid -> its row: asking for it may take a while

    def write(self, worker_pids: Iterable[int]) -> None:
        """Replace the file as a whole, readable by this user only."""
        row = {
            "supervisor": self._process(os.getpid()),
            "children": [self._process(pid) | {"role": "worker"} for pid in worker_pids],
            "host": self._host,
            "port": self._port,
        }
        fresh = self.path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(row, file)
        fresh.replace(self.path)

    def _process(self, pid: int) -> dict[str, Any]:
        if pid not in self._rows:
            self._rows[pid] = {"pid": pid, "started": process_started(pid)}
        return self._rows[pid]

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
