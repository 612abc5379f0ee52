"""Checks how the command starts and ends with scripted workers: refusals, signals, kills."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.leaving_clients import BODIES, Leaving


def test_a_worker_that_cannot_start_ends_the_command_with_its_reason() -> None:
    server = FakeServer(FAKE_WORKER_REFUSES="no such model")
    server.start()
    assert server.process is not None
    assert server.process.wait(15) == 78
    assert "no such model" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()
    assert not any(Path(server.run_dir, "run", str(server.port)).iterdir())


def test_a_signal_during_the_start_ends_it_clean() -> None:
    server = FakeServer()
    server.start()
    server.until(lambda: server.worker_log.exists())
    assert server.stop(signal.SIGINT) < 5
    assert server.process is not None
    assert server.process.returncode == 0
    assert not any(Path(server.run_dir, "run", str(server.port)).iterdir())


def test_ends_on_a_signal_and_after_a_kill_leaves_no_worker() -> None:
    server = FakeServer()
    server.start()
    server.wait_until_ready()
    worker_pid = server.worker()["pid"]
    assert server.process is not None
    server.process.kill()
    server.process.wait()
    server.until(lambda: not _runs(worker_pid))
    server.start()
    server.wait_until_ready()
    worker_pid = server.worker()["pid"]
    client = Leaving(server, "/v1/messages", BODIES["/v1/messages"]("n=999 delay=1", stream=True))
    client.read_some()
    assert server.stop() < 5
    assert server.process.returncode == 0
    assert b"The server is shutting down." in client.read_some()
    client.leave()
    assert not _runs(worker_pid)
    assert not any(Path(server.run_dir, "run", str(server.port)).iterdir())


def test_the_proxy_starts_without_what_local_answers_do_not_need() -> None:
    heavy = {"litellm", "fastapi", "aiohttp", "openai", "mlx", "numpy"}
    code = f"import sys, hearth.proxy.main\nprint('loaded', *({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "loaded\n"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
