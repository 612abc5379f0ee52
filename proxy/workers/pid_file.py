"""Writes `<instance_dir>/hearth.json`, which names our processes for a later start.

It names our models too, so that `hearth rm` removes none that is served.
"""

import json
import logging
import os
import subprocess
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hearth.shared.processes import PID_FILE, process_started

log = logging.getLogger(__name__)


class PidFile:
    """Names this server's processes, each with its start time, since pids are reused.

    A thread of its own asks for the times (on macOS `ps` does, which may take a second) and writes.
    Any thread may call it. Invariant: a start time is remembered for as long as each `write` names
    its pid, and once removed the file stays so.
    """

    def __init__(self, directory: Path, host: str, port: int, models: Sequence[str] = ()) -> None:
        """`models` are directories and hub ids: what MODEL_PATH and its like name."""
        self.path = directory / PID_FILE
        self._fresh = self.path.with_suffix(".new")
        self._host = host
        self._port = port
        self._models = [_absolute(each) for each in models]
        self._started: dict[int, float | None] = {}  # pid -> when it started. Owner: the thread
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pid file")
        self._lock = threading.Lock()  # held for a file's change alone
        self._is_removed = False

    def write(self, worker_pids: Iterable[int]) -> Future[None]:
        """Have the file name these workers, once all earlier calls are done. Never waits.

        It is called whenever a worker has ended, before another can get its pid.
        """
        return self._thread.submit(self._write, (os.getpid(), *worker_pids))

    def remove(self) -> None:
        """Remove the file, whatever waits to be written."""
        with self._lock:
            self._is_removed = True
            self.path.unlink(missing_ok=True)
            self._fresh.unlink(missing_ok=True)

    # ------------------------------------------------------------ the thread

    def _write(self, pids: tuple[int, ...]) -> None:
        try:
            rows = self._rows(pids)
            with self._lock:
                if not self._is_removed:
                    self._replace(rows)
        except (OSError, subprocess.SubprocessError) as error:  # supervision must not end by it
            log.error("pid file cannot be written: %s", error)

    def _rows(self, pids: tuple[int, ...]) -> list[dict[str, Any]]:
        """Return a row for each process; what is known of others is forgotten."""
        self._started = {pid: self._started.get(pid) or process_started(pid) for pid in pids}
        return [{"pid": pid, "started": self._started[pid]} for pid in pids]

    def _replace(self, rows: list[dict[str, Any]]) -> None:
        """Replace the file as a whole, readable by this user only."""
        assert self._lock.locked() and rows, rows
        row = {
            "supervisor": rows[0],
            "children": [each | {"role": "worker"} for each in rows[1:]],
            "host": self._host,
            "port": self._port,
            "models": self._models,
        }
        self._fresh.unlink(missing_ok=True)
        descriptor = os.open(self._fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(row, file)
        self._fresh.replace(self.path)


def _absolute(source: str) -> str:
    """Return a directory as others find it, a hub id or an alias as it is."""
    try:
        path = Path(source).expanduser()
        return str(path.resolve()) if path.exists() else source
    except (OSError, RuntimeError):
        return source
