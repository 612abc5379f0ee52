"""Starts a real Hearth with the users' command, on a free port, in a directory of its own."""

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import openai

from hearth.shared.linux_environment import openblas_environment
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.zmq_transport import HEARTBEAT_S
from scripts.docs.settings_table import example_lines
from scripts.fixtures.fixture_cache import fixture_dir

READY_S_MAX = 120.0  # a loaded 2-core machine takes 20 s
LOG_CHARS_MAX = 4_000  # told where a test fails
WAIT_S_MAX = 60.0  # for what takes tenths of a second on an idle machine


def until(condition: Callable[[], Any], wait_s: float = WAIT_S_MAX) -> Any:
    """Wait until the condition gives something, and return it."""
    deadline = time.monotonic() + wait_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return found


_reserved = contextlib.ExitStack()
atexit.register(_reserved.close)


def free_port() -> int:
    """Return a port that nobody else is given while this process runs, and nobody listens on.

    A server takes seconds to bind its port, and clients of one that has ended may ask on. On Linux
    a port that is bound and not listened on may be bound again by who asks for that very one.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port: int = probe.getsockname()[1]
    if sys.platform == "linux":
        _reserved.enter_context(probe)
    else:
        probe.close()
    return port


class Server:
    """One `python -m hearth.proxy.main`; use as a context manager.

    Without MODEL_PATH it serves the qwen3 fixture as `local`: random weights, which seldom end.
    """

    def __init__(self, **settings: str) -> None:
        if "MODEL_PATH" not in settings:
            settings = {
                "MODEL_PATH": str(fixture_dir("qwen3")),
                "PROXY_MODEL_ID": "local",
            } | settings
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.run_dir = Path(tempfile.mkdtemp(prefix="hearth-"))
        self.log = self.run_dir / "log"
        defaults = dict(line.split("=", 1) for line in example_lines()[1::2])
        self.environment = {
            **os.environ,
            **openblas_environment(os.environ),
            **defaults,  # whatever a developer's .env says
            "PROXY_PORT": str(self.port),
            "RUN_DIR": str(self.run_dir / "run"),
            "LOG_ROOT": str(self.run_dir / "logs"),
            "KV_CACHE_DIR": str(self.run_dir / "kv"),
            "PYTHONFAULTHANDLER": "1",  # a crash is in the log
            "DOCTOR": "off",  # no checks in a test that pauses for a minute
            **settings,
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *command: str) -> None:
        """Start without waiting; `command` is what runs instead of the server itself."""
        command = command or ("-m", "hearth.proxy.main")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=PROJECT_DIR,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        self.start()
        self.wait_until_ready()
        return self

    @contextlib.contextmanager
    def ready(self) -> Iterator[Self]:
        """Give it once it is ready, whatever has started it, and end it after that."""
        try:
            self.wait_until_ready()
            yield self
        finally:
            self.__exit__()

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def stop(self, with_signal: int = signal.SIGTERM) -> float:
        """End it as a user would and return the seconds that took."""
        assert self.process is not None
        began = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return time.monotonic() - began

    def wait_until_ready(self, wait_s: float = READY_S_MAX) -> None:
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, f"it ended:\n{self.log.read_text()}"
            if self.health().get("status") == "ok":
                return
            time.sleep(0.1)
        raise AssertionError(f"not ready after {wait_s} s:\n{self.log.read_text()}")

    def health(self) -> dict[str, Any]:
        """GET /health; {} while nothing answers."""
        try:
            return dict(self.get("/health"))
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return {}

    def state_text(self) -> str:
        """Return whether its process runs, and the end of its log."""
        code = None if self.process is None else self.process.poll()
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        state = "runs" if code is None else f"ended with {code}"
        return f"The server at {self.url} {state}. Its log ends:\n{log[-LOG_CHARS_MAX:]}"

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        """Return a client of this server; close it, or use it in a `with`."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=3 * WAIT_S_MAX
        )

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=WAIT_S_MAX) as answer:
            return json.load(answer)

    def forget(self) -> None:
        """Empty every worker's cache."""
        request = urllib.request.Request(f"{self.url}/v1/cache", method="DELETE")
        with urllib.request.urlopen(request, timeout=WAIT_S_MAX) as answer:
            assert answer.status == 200

    def worker(self, number: int = 0) -> dict[str, Any]:
        return dict(self.health()["workers"][number])

    def wait_until_idle(self, wait_s: float = WAIT_S_MAX) -> None:
        """Until no request is left in any worker, as a heartbeat sent from now on says."""
        time.sleep(HEARTBEAT_S * 1.2)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            workers = self.health().get("workers", [])
            if workers and all(w["running"] == w["waiting"] == 0 for w in workers):
                return
            time.sleep(0.05)
        raise AssertionError(f"requests are left: {self.health()}")
