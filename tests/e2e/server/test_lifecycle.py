"""Starting and ending: nothing is left behind, and what cannot start says why in one line."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import openai
import psutil
import pytest

from hearth.shared.settings_from_env import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.servers.counted_talk import ASK, FACT, NOTES, Talk
from tests.helpers.servers.server import Server

END_S_MAX = 5.0


def children(server: Server) -> list[psutil.Process]:
    assert server.process is not None
    return psutil.Process(server.process.pid).children(recursive=True)


def assert_nothing_is_left(server: Server, family: list[psutil.Process]) -> None:
    alive = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive, alive
    run_dir = server.run_dir / "run" / str(server.port)
    assert not list(run_dir.glob("*.sock")) and not list(run_dir.glob("*.json"))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past TIME_WAIT, not a holder
        probe.bind(("127.0.0.1", server.port))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_within_5_s_twice_in_a_row(number: signal.Signals) -> None:
    with Server(WORKERS="2", MLX_PORT="8080") as server:
        for attempt in range(2):
            if attempt:
                server.start()
                server.wait_until_ready()
            told = server.log.read_text().count("MLX_PORT is set and has no effect")
            assert told == attempt + 1, "once a start, whatever the workers"
            family = children(server)
            assert len(family) >= 2
            with server.openai() as client:
                stream = client.chat.completions.create(
                    model="local",
                    messages=[{"role": "user", "content": "go on for ever"}],
                    max_tokens=20_000,
                    stream=True,
                )
                next(iter(stream))
                took = server.stop(number)
            assert took < END_S_MAX, f"{took:.1f} s"
            assert server.process is not None and server.process.returncode == 0
            assert_nothing_is_left(server, family)


def test_the_command_starts_it_leaves_a_running_one_alone_and_ends_with_it() -> None:
    with Server() as server:
        server.stop()
        server.start("install_and_run.py", "--port", str(server.port))
        server.wait_until_ready()
        assert server.process is not None
        second = subprocess.run(
            [sys.executable, "install_and_run.py"],
            cwd=PROJECT_DIR,
            env=server.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 1
        assert f"already runs on {server.url} (pid {server.process.pid})" in second.stderr
        assert server.health()["status"] == "ok"
        family = children(server)
        assert server.stop(signal.SIGINT) < END_S_MAX
        assert_nothing_is_left(server, family)


def test_workers_end_by_themselves_when_the_supervisor_is_killed() -> None:
    with Server() as server:
        family = children(server)
        server.stop(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=END_S_MAX)
        assert not alive


def test_where_a_worker_dies_its_sessions_go_on_at_another_that_reads_its_files() -> None:
    with Server(WORKERS="2") as server:
        first, second = server.health()["workers"]
        talk = Talk(server)
        talk.say(f"{NOTES}\n{FACT.format('7731')}")
        wait_until(lambda: server.get("/v1/cache")["workers"][0]["disk"]["queue_bytes"] == 0)
        assert server.worker(1)["steps"] == 0, "of two idle ones the first is asked"
        psutil.Process(first["pid"]).kill()
        wait_until(lambda: server.worker(0)["restarts"] > 0)
        talk.say(ASK)
        assert talk.source == "ssd" and talk.prefilled < talk.cached / 4
        assert server.worker(1)["pid"] == second["pid"]
        talk.assert_as_cold()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start_and_fail(**settings: str) -> str:
    """Start a server that cannot start; return what it said on its way out."""
    server = Server(**settings)
    try:
        server.start()
        assert server.process is not None
        assert server.process.wait(60) == 78
        return server.log.read_text()
    finally:
        assert server.process is not None
        server.process.kill()
        shutil.rmtree(server.run_dir, ignore_errors=True)


def broken(tmp_path: Path, kind: str) -> Path:
    directory = tmp_path / kind
    if kind == "missing":
        return directory
    shutil.copytree(fixture_dir("qwen3"), directory)
    if kind == "truncated":
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    if kind == "unsupported":
        config = directory / "config.json"
        config.write_text(config.read_text().replace('"qwen3"', '"telepathy"'))
    if kind == "no-weights":
        (directory / "model.safetensors").unlink()
    return directory


@pytest.mark.parametrize("kind", ["missing", "truncated", "unsupported", "no-weights"])
def test_a_model_that_cannot_be_loaded_is_said_in_one_line(tmp_path: Path, kind: str) -> None:
    said = start_and_fail(MODEL_PATH=str(broken(tmp_path, kind)))
    (line,) = [row for row in said.splitlines() if "MODEL_PATH" in row]
    assert kind in line or "telepathy" in line
    assert "Traceback" not in said


def test_a_bad_setting_is_said_in_one_line() -> None:
    said = start_and_fail(QUEUE_MAX="many")
    assert "QUEUE_MAX is 'many'; allowed is a whole number from 1 to 10,000." in said
    assert "Traceback" not in said


def test_a_busy_port_is_said_and_left_alone() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        said = start_and_fail(PROXY_PORT=str(holder.getsockname()[1]))
        assert str(holder.getsockname()[1]) in said and "Traceback" not in said


def test_the_key_is_required_and_neither_it_nor_a_prompt_is_logged() -> None:
    """The worker's command line carries no key and no prompt."""
    with Server(PROXY_API_KEY="sk-secret-of-the-test") as server:
        for process in children(server):
            assert "sk-secret" not in " ".join(process.cmdline())
        with server.openai("wrong") as wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        with server.openai("sk-secret-of-the-test") as right:
            right.chat.completions.create(
                model="local",
                messages=[{"role": "user", "content": "my-private-words"}],
                max_tokens=2,
            )
        server.stop()
        log = server.log.read_text()
        assert "sk-secret" not in log and "my-private-words" not in log


def test_a_worker_alone_says_what_it_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hearth.worker.main"],
        cwd=PROJECT_DIR,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2 and "--endpoint" in done.stderr
