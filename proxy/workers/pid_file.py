"""Writes `<instance_dir>/hearth.json`, which lists this server's processes for a later start.

The file lists the served models too, which `hearth rm` then does not remove.
"""

import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from hearth.shared.private_files import write_small_file
from hearth.shared.processes import PID_FILE, process_started

log = logging.getLogger(__name__)


class PidFile:
    """Lists this server's processes, each with its start time, since pids are reused.

    Owner: the event loop. Reading a start time does not block.
    """

    def __init__(self, directory: Path, host: str, port: int, models: Sequence[str] = ()) -> None:
        """`models` are directories and hub ids, as in MODEL_PATH and MODELS."""
        self.path = directory / PID_FILE
        self._server_fields = {
            "host": host,
            "port": port,
            "models": [_absolute(model) for model in models],
        }

    def write(self, worker_pids: Iterable[int]) -> None:
        """Replace the file atomically with one that lists these workers; only this user reads it.

        Call it whenever a worker has ended, before another process can get its pid.
        """
        own, *children = (
            {"pid": pid, "started": process_started(pid)} for pid in (os.getpid(), *worker_pids)
        )
        workers = [child | {"role": "worker"} for child in children]
        content = {"supervisor": own, "children": workers, **self._server_fields}
        try:
            write_small_file(self.path, json.dumps(content).encode())
        except OSError as error:  # supervision goes on without the file
            log.error("pid file cannot be written: %s", error)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _absolute(source: str) -> str:
    """Return the absolute path of a directory; a hub id or an alias unchanged."""
    try:
        path = Path(source).expanduser()
        return str(path.resolve()) if path.exists() else source
    except (OSError, RuntimeError):
        return source
