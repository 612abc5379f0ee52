"""Workers on other machines against scripted ones: real processes, real CURVE over loopback."""

import asyncio
import contextlib
import errno
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.commands.make_keys import make_keys
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import models_of
from hearth.proxy.workers import remote_workers as remote_module
from hearth.proxy.workers.model_swap import ModelSwapper
from hearth.proxy.workers.remote_workers import SILENT, RemoteWorkers, hint_of
from hearth.proxy.workers.supervisor import Supervisor
from hearth.shared.errors import Overloaded, StartError, WorkerLost
from hearth.shared.settings import Settings, load_settings
from tests.helpers.proxy.fake_worker_pool import COMMAND, read, request, until, worker_environment
from tests.helpers.servers.server import free_port

pytestmark = pytest.mark.process

MODELS = models_of(load_settings({}, None))


@pytest.fixture(scope="module")
def keys_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run") / "keys"
    make_keys(directory)
    return directory


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WATCH_S", "RETRY_S", "REFUSED_RETRY_S"):
        monkeypatch.setattr(remote_module, name, 0.1)


class Machine:
    """Another machine, on which somebody starts a worker by hand."""

    def __init__(self, keys_dir: Path) -> None:
        self.port = free_port()
        self.keys_dir = keys_dir
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **environ: str) -> None:
        endpoint = f"tcp://127.0.0.1:{self.port}"
        more = {"CURVE_KEYS_DIR": str(self.keys_dir)}
        self.process = subprocess.Popen(
            [*COMMAND, "--worker-id", "7", "--endpoint", endpoint],
            env=worker_environment() | more | environ,
            stdin=subprocess.DEVNULL,
        )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def machine(keys_dir: Path) -> Iterator[Machine]:
    made = Machine(keys_dir)
    yield made
    made.end()


def settings_of(keys_dir: Path, *ports: int, **environ: str) -> Settings:
    endpoints = ",".join(f"tcp://127.0.0.1:{port}" for port in ports)
    given = {"WORKERS": "0", "WORKER_ENDPOINTS": endpoints, "CURVE_KEYS_DIR": str(keys_dir)}
    return load_settings(given | environ, None)


class Bench:
    """A pool whose workers are all on other machines."""

    def __init__(self, settings: Settings) -> None:
        self.pool = WorkerPool()
        models = models_of(settings)
        supervisor = Supervisor(["true"], 0, Path("/nowhere"), self.pool, {})
        ModelSwapper(supervisor, self.pool, models, 0)  # tells who finds no worker
        self.remote = RemoteWorkers(settings, self.pool, models)
        self.worker = self.remote.workers[0]

    async def until_ready(self) -> None:
        await until(lambda: self.worker.state == "ready")

    async def text(self, script: str, name: str = "r") -> str:
        return (await read(await self.pool.open(request(script), name)))[0]


@contextlib.asynccontextmanager
async def bench(settings: Settings) -> AsyncIterator[Bench]:
    made = Bench(settings)
    made.remote.start()
    try:
        yield made
    finally:
        made.remote.stop()
        made.pool.close()


async def test_a_silent_worker_is_given_up_never_killed_and_found_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "SILENCE_S_MAX", 1.5)

    async with bench(settings_of(machine.keys_dir, machine.port)) as made:
        machine.start()
        await made.until_ready()
        answer = await made.pool.open(request("n=100000 delay=0.01"), "r")
        machine.signal(signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="silent"):
            await asyncio.wait_for(read(answer), 60)
        assert made.worker.health_fields()["problem"] == SILENT
        assert machine.process is not None and machine.process.poll() is None
        machine.signal(signal.SIGCONT)
        await made.until_ready()
        assert await made.text("n=1") == "tok0 "
        assert made.worker.restarts == 0, "it is the same start of the worker"


def test_why_a_worker_is_not_reached_is_told_with_what_macos_has_to_do_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_module.asyncio, "open_connection", no_route)
    endpoint = "tcp://192.168.1.9:5555"
    on_mac, on_linux = (asyncio.run(hint_of(endpoint, name)) for name in ("darwin", "linux"))
    assert "No route to host" in on_mac and "Local Network" in on_mac
    assert on_linux == "Connecting gives 'No route to host'."
    monkeypatch.setattr(remote_module, "CONNECT_S_MAX", 0.01)
    monkeypatch.setattr(remote_module.asyncio, "open_connection", no_answer)
    for name in ("darwin", "linux"):
        assert "no answer" in asyncio.run(hint_of(endpoint, name))
    assert asyncio.run(hint_of("tcp://name.invalid:5555", "linux")).startswith("Connecting g")


async def no_route(host: str, port: int) -> Any:
    assert isinstance(port, int), port
    raise OSError(errno.EHOSTUNREACH, "No route to host", host)


async def no_answer(host: str, port: int) -> Any:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    "endpoints",
    [
        *("ipc:///tmp/w.sock", "tcp://10.0.0.5", "tcp://:5000", "tcp://*:5000", "10.0.0.5:5000"),
        *("tcp://10.0.0.5:0", "tcp://10.0.0.5:99999", "tcp://10.0.0.5:5000/x", "tcp://a b:5000"),
        *(
            "tcp://lo;tcp://10.0.0.5:5000",
            "tcp://.:1",
            "tcp://u@10.0.0.5:5000",
            "tcp://a:1,tcp://a:1",
        ),
    ],
)
def test_what_is_no_endpoint_refuses_to_start(keys_dir: Path, endpoints: str) -> None:
    environ = {"WORKER_ENDPOINTS": endpoints, "CURVE_KEYS_DIR": str(keys_dir)}
    with pytest.raises(StartError, match=r"allowed is tcp://ADDRESS:PORT"):
        RemoteWorkers(load_settings(environ, None), WorkerPool(), MODELS)


def test_workers_on_other_machines_need_keys_and_no_worker_here(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "none", 5000)
    with pytest.raises(StartError, match=r"hearth keys"):
        RemoteWorkers(settings, WorkerPool(), MODELS)
    with pytest.raises(StartError, match="WORKERS is 0 and WORKER_ENDPOINTS is empty"):
        load_settings({"WORKERS": "0"}, None)
    assert RemoteWorkers(load_settings({}, None), WorkerPool(), MODELS).workers == []


async def test_a_worker_of_another_model_gets_no_request(machine: Machine) -> None:
    async with bench(settings_of(machine.keys_dir, machine.port)) as made:
        machine.start(PROXY_MODEL_ID="another")
        problem = "serves 'another', this server 'smollm2': set MODEL_PATH and PROXY_MODEL_ID"
        await until(lambda: made.worker.problem.startswith(problem))
        with pytest.raises(Overloaded, match="serves 'another'"):
            await made.pool.open(request("n=1"), "r")


def test_ids_follow_those_of_this_machines_workers(keys_dir: Path) -> None:
    settings = settings_of(keys_dir, 5000, 5001, WORKERS="2")
    workers = RemoteWorkers(settings, WorkerPool(), MODELS).workers
    assert [worker.worker_id for worker in workers] == [2, 3]
