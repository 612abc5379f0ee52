"""Writes `<instance_dir>/hearth.json`, which names our processes for a later start.

It names our models too, so that `hearth rm` removes none that is served.
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
    """Names this server's processes, each with its start time, since pids are reused.

    Owner: the event loop. The system tells a start time at once.
    """

    def __init__(self, directory: Path, host: str, port: int, models: Sequence[str] = ()) -> None:
        """`models` are directories and hub ids: what MODEL_PATH and its like name."""
        self.path = directory / PID_FILE
        self._told = {"host": host, "port": port, "models": [_absolute(each) for each in models]}

    def write(self, worker_pids: Iterable[int]) -> None:
        """Replace the file as a whole, readable by this user only, by one that names these workers.

        It is called whenever a worker has ended, before another can get its pid.
        """
        own, *children = (
            {"pid": pid, "started": process_started(pid)} for pid in (os.getpid(), *worker_pids)
        )
        workers = [each | {"role": "worker"} for each in children]
        row = {"supervisor": own, "children": workers, **self._told}
        try:
            write_small_file(self.path, json.dumps(row).encode())
        except OSError as error:  # supervision must not end by it
            log.error("pid file cannot be written: %s", error)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _absolute(source: str) -> str:
    """Return a directory as others find it, a hub id or an alias as it is."""
    try:
        path = Path(source).expanduser()
        return str(path.resolve()) if path.exists() else source
    except (OSError, RuntimeError):
        return source
