"""Starts `hearth worker` as its user would on another machine: an address and a home of its own."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hearth.shared.openblas_preload import openblas_environment
from hearth.shared.processes import PID_FILE, read_pid_file
from hearth.shared.settings_from_env import PROJECT_DIR, example_lines
from tests.helpers.servers.server import READY_S_MAX, free_port

END_S_MAX = 60.0


class WorkerCommand:
    """One `hearth worker`, with directories of its own; use as a context manager."""

    def __init__(self, keys: Path, address: str = "127.0.0.1", **settings: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hearth-"))
        self.log = self.directory / "log"
        self.port = free_port()
        self.endpoint = f"tcp://{address}:{self.port}"
        defaults = dict(line.split("=", 1) for line in example_lines()[1::2])
        self.environment = {
            **os.environ,
            **openblas_environment(os.environ),
            **defaults,  # whatever a developer's .env says
            "RUN_DIR": str(self.directory / "run"),
            "LOG_ROOT": str(self.directory / "logs"),
            "KV_CACHE_DIR": str(self.directory / "kv"),
            "CURVE_KEYS_DIR": str(keys),
            "DOCTOR": "off",
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start without waiting, in a shell of its own from which nothing is typed."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hearth.commands.main", "worker", self.endpoint],
                cwd=PROJECT_DIR,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def worker_pids(self) -> list[int]:
        """The processes that compute, as the pid file names them."""
        _, children = read_pid_file(self.directory / "run" / str(self.port) / PID_FILE)
        return [child.pid for child in children if child.is_running]

    def wait_for(self, text: str, count: int = 1, wait_s: float = READY_S_MAX) -> None:
        """Wait until its log has `text` so many times."""
        deadline = time.monotonic() + wait_s
        while self.log.read_text().count(text) < count:
            assert self.process is not None and self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal the command and return its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(END_S_MAX)

    def __enter__(self) -> "WorkerCommand":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)
