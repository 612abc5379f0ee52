"""A proxy without workers of its own, and a real one that was started by hand on tcp://."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.commands.make_keys import make_keys
from hearth.shared.settings_from_env import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.server import Server, free_port

WORDS = " ".join(f"word{number}" for number in range(200))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    make_keys(tmp_path / "keys")
    made = Server(
        MODEL_PATH=str(fixture_dir("qwen3")),
        PROXY_MODEL_ID="local",
        WORKERS="0",
        WORKER_ENDPOINTS=f"tcp://127.0.0.1:{free_port()}",
        CURVE_KEYS_DIR=str(tmp_path / "keys"),
    )
    yield made
    made.__exit__()


def worker_of(server: Server) -> "subprocess.Popen[bytes]":
    """Start the worker as its user would: in a shell of its own, from which nothing is typed."""
    port = server.environment["WORKER_ENDPOINTS"].rpartition(":")[2]
    endpoint = f"tcp://0.0.0.0:{port}"
    with server.log.open("ab") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "hearth.worker.main",
                "--worker-id",
                "3",
                "--endpoint",
                endpoint,
            ],
            cwd=PROJECT_DIR,
            env=server.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def cached(server: Server) -> int:
    with server.openai() as client:
        answer = client.chat.completions.create(
            model="local", messages=[{"role": "user", "content": WORDS}], max_tokens=4
        )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_a_worker_started_by_hand_on_tcp_outlives_proxies_and_keeps_its_cache(
    server: Server,
) -> None:
    worker = worker_of(server)
    try:
        server.start()
        server.wait_until_ready()
        (row,) = server.health()["workers"]
        assert (row["state"], row["pid"], row["model"]) == ("ready", None, "local")
        assert "loading" in server.log.read_text() and "on other machines" in server.log.read_text()
        assert cached(server) == 0 and cached(server) > 150
        server.stop()
        assert worker.poll() is None, "it is not the proxy's to end"
        server.start()
        server.wait_until_ready()
        assert cached(server) > 150
        server.stop(signal.SIGKILL)
        time.sleep(1.5)  # longer than between two looks at a supervisor
        assert worker.poll() is None
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(10) == 0
    finally:
        if worker.poll() is None:
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait()
