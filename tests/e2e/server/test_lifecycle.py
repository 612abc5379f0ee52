"""Starting and ending: nothing is left behind, and what cannot start says why in one line."""

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hearth.shared.paths import PROJECT_DIR
from scripts.fixtures.fixture_cache import fixture_dir
from tests.helpers.by_day import by_day
from tests.helpers.servers.audited_server import body_of
from tests.helpers.servers.counted_talk import ASK, FACT, NOTES, Talk
from tests.helpers.servers.fake_server import FakeServer
from tests.helpers.servers.leaving_clients import Leaving
from tests.helpers.servers.server import WAIT_S_MAX, Server, until

CHAT = "/v1/chat/completions"


def family_of(server: Server) -> list[psutil.Process]:
    assert server.process is not None
    return list(psutil.Process(server.process.pid).children(recursive=True))


def assert_nothing_is_left(server: Server, family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=WAIT_S_MAX)
    assert not alive
    run_dir = server.run_dir / "run" / str(server.port)
    assert not list(run_dir.glob("*.sock")) and not list(run_dir.glob("*.json"))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past TIME_WAIT, not a holder
        probe.bind(("127.0.0.1", server.port))


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """A server of two workers, which each test may end in its way."""
    with Server(WORKERS="2", MLX_PORT="8080") as running:
        yield running


@pytest.fixture
def server(pair: Server) -> Server:
    if pair.process is None or pair.process.poll() is not None:
        pair.start()
        pair.wait_until_ready()
    return pair


def test_where_a_worker_dies_its_sessions_go_on_at_another_that_reads_its_files(
    server: Server,
) -> None:
    first, second = server.health()["workers"]
    talk = Talk(server)
    talk.say(f"{NOTES}\n{FACT.format('7731')}")
    until(lambda: server.get("/v1/cache")["workers"][0]["disk"]["queue_bytes"] == 0)
    assert server.worker(1)["steps"] == 0, "of two idle ones the first is asked"
    psutil.Process(first["pid"]).kill()
    until(lambda: server.worker(0)["restarts"] > 0)
    talk.say(ASK)
    assert talk.source == "ssd" and talk.prefilled < talk.cached / 4
    assert server.worker(1)["pid"] == second["pid"]
    talk.assert_as_cold()


def test_workers_end_by_themselves_when_the_supervisor_is_killed(server: Server) -> None:
    family = family_of(server)
    server.stop(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=WAIT_S_MAX)
    assert not alive


@pytest.mark.parametrize("number", by_day([signal.SIGINT, signal.SIGTERM], [signal.SIGTERM]))
def test_a_signal_tells_clients_ends_everything_and_leaves_nothing(
    server: Server, number: signal.Signals
) -> None:
    family = family_of(server)
    assert len(family) >= 2
    client = Leaving(server, CHAT, body_of(CHAT, "go on", 20_000, stream=True))
    assert b"200 OK" in client.read_some()
    server.stop(number)
    assert b"The server is shutting down." in client.read_all()
    assert server.process is not None and server.process.returncode == 0
    assert_nothing_is_left(server, family)
    log = server.log.read_text()
    told = [log.count(words) for words in ("MLX_PORT is set and has no effect", "ready: http")]
    assert told[0] == told[1], "once a start, whatever the workers"


def test_the_command_starts_it_leaves_a_running_one_alone_and_ends_with_it() -> None:
    server = Server()
    server.start("install_and_run.py", "--port", str(server.port))
    with server.ready():
        second = subprocess.run(
            [sys.executable, "install_and_run.py"],
            cwd=PROJECT_DIR,
            env=server.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S_MAX,
        )
        assert second.returncode == 1 and server.process is not None
        assert f"already runs on {server.url} (pid {server.process.pid})" in second.stderr
        assert server.health()["status"] == "ok"
        family = family_of(server)
        server.stop(signal.SIGINT)
        assert_nothing_is_left(server, family)


def test_a_signal_during_the_start_ends_it_clean() -> None:
    server = FakeServer()
    server.start()
    until(server.worker_log.exists)
    server.stop(signal.SIGINT)
    assert server.process is not None and server.process.returncode == 0
    assert not any(Path(server.run_dir, "run", str(server.port)).iterdir())
    server.__exit__()


def said_by(**settings: str) -> str:
    """Start a server that cannot start; return what it said on its way out."""
    server = Server(**settings)
    server.start()
    assert server.process is not None
    try:
        assert server.process.wait(WAIT_S_MAX) == 78
        said = server.log.read_text()
        assert "Traceback" not in said
        return said
    finally:
        server.process.kill()
        shutil.rmtree(server.run_dir, ignore_errors=True)


def broken(directory: Path, kind: str) -> Path:
    """Return a checkpoint that is `kind`."""
    if kind == "missing":
        return directory / kind
    shutil.copytree(fixture_dir("qwen3"), directory / kind)
    weights, config = (directory / kind / name for name in ("model.safetensors", "config.json"))
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif kind == "telepathy":
        config.write_text(config.read_text().replace('"qwen3"', '"telepathy"'))
    else:
        weights.unlink()
    return directory / kind


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "telepathy",
        *(pytest.param(k, marks=pytest.mark.night) for k in ("missing", "bare")),
    ],
)
def test_a_model_that_cannot_be_loaded_is_said_in_one_line(tmp_path: Path, kind: str) -> None:
    said = said_by(MODEL_PATH=str(broken(tmp_path, kind)))
    (line,) = [row for row in said.splitlines() if "MODEL_PATH" in row]
    assert kind in line


def test_a_bad_setting_and_a_busy_port_are_said() -> None:
    said = said_by(QUEUE_MAX="many")
    assert "QUEUE_MAX is 'many'; allowed is a whole number from 1 to 10,000." in said
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        assert port in said_by(PROXY_PORT=port)


def test_the_proxy_starts_without_what_local_answers_do_not_need() -> None:
    heavy = {"litellm", "fastapi", "aiohttp", "openai", "mlx", "numpy"}
    code = f"import sys, hearth.proxy.main\nprint('loaded', *({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "loaded\n"
