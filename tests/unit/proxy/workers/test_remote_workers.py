"""Workers on other machines against scripted ones: real processes, real CURVE over loopback."""

import asyncio
import contextlib
import errno
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given, strategies as st

from hearth.commands.make_keys import make_keys
from hearth.proxy.monitoring.admin_routes import AdminRoutes
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import models_of
from hearth.proxy.workers import remote_workers as remote_module
from hearth.proxy.workers.model_swap import ModelSwapper
from hearth.proxy.workers.remote_workers import (
    GONE,
    SILENT,
    UNKNOWN,
    RemoteWorkers,
    check_endpoints,
    hint_of,
)
from hearth.proxy.workers.supervisor import Supervisor
from hearth.shared.errors import Overloaded, StartError, WorkerLost
from hearth.shared.settings_from_env import Settings, load_settings
from tests.helpers.proxy.fake_worker_pool import COMMAND, read, request, worker_environment
from tests.helpers.servers.server import free_port

pytestmark = pytest.mark.process

LONG = "n=100000 delay=0.01"
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

    async def until(self, condition: Callable[[], Any], wait_s: float = 60.0) -> None:
        async with asyncio.timeout(wait_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_ready(self) -> None:
        await self.until(lambda: self.worker.state == "ready")

    async def text(self, script: str, name: str = "r") -> str:
        return (await read(await self.pool.open(request(script), name)))[0]


class Network:
    """What carries bytes between a proxy and a worker."""

    def __init__(self, to_port: int) -> None:
        self.port = free_port()
        self._to_port = to_port
        self._lines: list[asyncio.StreamWriter] = []
        self._carrying: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._carrying)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, away = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:  # the worker is not there yet
            writer.close()
            return
        self._lines += [writer, away]
        for source, target in ((reader, away), (there, writer)):
            self._carrying.add(asyncio.create_task(_pump(source, target)))

    def cut(self) -> None:
        for line in self._lines:
            line.transport.abort()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while octets := await source.read(65536):
            target.write(octets)
    target.transport.abort()


@contextlib.asynccontextmanager
async def bench(settings: Settings) -> AsyncIterator[Bench]:
    made = Bench(settings)
    made.remote.start()
    try:
        yield made
    finally:
        made.remote.stop()
        made.pool.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 180))  # type: ignore[arg-type]


def test_an_answer_comes_from_a_worker_on_another_machine_and_health_shows_it(
    machine: Machine, tmp_path: Path
) -> None:
    settings = settings_of(machine.keys_dir, machine.port, RUN_DIR=str(tmp_path))

    async def body() -> None:
        async with bench(settings) as made:
            supervisor = Supervisor(["true"], 0, tmp_path, made.pool, {})
            routes = AdminRoutes(settings, "0", supervisor, made.pool, made.remote.workers)
            assert (routes.health()["status"], routes.health()["ready"]) == ("degraded", False)
            (row,) = routes.health()["workers"]
            assert (row["state"], row["problem"]) == ("unreachable", "has not answered yet")
            await made.until(lambda: made.worker.hint)
            (row,) = routes.health()["workers"]
            assert "Nothing listens there: `hearth worker`" in row["problem"]
            with pytest.raises(Overloaded, match="Nothing listens there"):
                await made.pool.open(request("n=1"), "r")
            machine.start()
            await made.until_ready()
            assert await made.text("n=2") == "tok0 tok1 "
            (row,) = routes.health()["workers"]
            assert (routes.health()["status"], routes.health()["ready"]) == ("ok", True)
            assert row["endpoint"] == f"tcp://127.0.0.1:{machine.port}"
            assert (row["id"], row["state"], row["problem"]) == (0, "ready", None)
            assert row["model"] == "smollm2"
            assert row["pid"] is None, "a pid of another machine must not be signalled on this one"

    run(body)


def test_a_worker_that_dies_fails_its_clients_at_once_and_is_used_again_when_it_is_back(
    machine: Machine,
) -> None:
    async def body() -> None:
        async with bench(settings_of(machine.keys_dir, machine.port)) as made:
            machine.start()
            await made.until_ready()
            answer = await made.pool.open(request(LONG), "r")
            machine.signal(signal.SIGKILL)
            with pytest.raises(WorkerLost, match=GONE):
                await asyncio.wait_for(read(answer), 60)
            await made.until(lambda: made.worker.state == "unreachable")
            assert made.worker.row()["problem"] == GONE
            with pytest.raises(Overloaded, match="on another machine"):
                await made.pool.open(request("n=1"), "r")
            assert made.worker.restarts == 0
            machine.start()
            await made.until_ready()
            await made.until(lambda: made.worker.restarts == 1)
            assert await made.text("n=1") == "tok0 "
            assert made.worker.row()["problem"] is None

    run(body)


def test_a_silent_worker_is_given_up_never_killed_and_found_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "SILENCE_S_MAX", 1.5)

    async def body() -> None:
        async with bench(settings_of(machine.keys_dir, machine.port)) as made:
            machine.start()
            await made.until_ready()
            answer = await made.pool.open(request(LONG), "r")
            machine.signal(signal.SIGSTOP)
            with pytest.raises(WorkerLost, match="silent"):
                await asyncio.wait_for(read(answer), 60)
            assert made.worker.row()["problem"] == SILENT
            assert machine.process is not None and machine.process.poll() is None
            machine.signal(signal.SIGCONT)
            await made.until_ready()
            assert await made.text("n=1") == "tok0 "
            assert made.worker.restarts == 0, "it is the same start of the worker"

    run(body)


def test_a_connection_that_breaks_while_the_worker_lives_leaves_no_client_waiting(
    machine: Machine,
) -> None:
    """zmq connects anew by itself, as a peer whom the worker has never heard of."""

    async def body() -> None:
        machine.start()
        network = Network(machine.port)
        settings = settings_of(machine.keys_dir, network.port)
        async with network, bench(settings) as made:
            await made.until_ready()
            answer = await made.pool.open(request(LONG), "r")
            network.cut()
            with pytest.raises(WorkerLost, match=GONE):
                await asyncio.wait_for(read(answer), 60)
            await made.until_ready()
            assert await made.text("n=1") == "tok0 "
            assert made.worker.restarts == 0

    run(body)


def test_what_a_worker_was_sent_is_sent_to_it_again_once_it_is_back(
    machine: Machine, keys_dir: Path
) -> None:
    """Its cache is on its own disk, so a conversation returns to it though others are as idle."""
    second = Machine(keys_dir)

    async def body() -> None:
        async with bench(settings_of(keys_dir, second.port, machine.port)) as made:
            machine.start()
            await made.until(lambda: made.remote.workers[1].state == "ready")
            prompt = request("n=1")
            marks = [b"a session"]
            made.pool.affinity.remember(marks, 1)
            machine.signal(signal.SIGKILL)
            await made.until(lambda: made.remote.workers[1].state == "unreachable")
            second.start()
            machine.start()
            await made.until(lambda: all(w.state == "ready" for w in made.remote.workers))
            chosen = made.pool.affinity.choose(made.pool.links.values(), marks)
            assert chosen is not None and chosen.worker_id == 1
            assert await read(await made.pool.open(prompt, "r"))

    try:
        run(body)
    finally:
        second.end()


def test_a_worker_of_another_model_gets_no_request(machine: Machine) -> None:
    async def body() -> None:
        async with bench(settings_of(machine.keys_dir, machine.port)) as made:
            machine.start(PROXY_MODEL_ID="another")
            problem = "serves 'another', this server 'smollm2': set MODEL_PATH and PROXY_MODEL_ID"
            await made.until(lambda: made.worker.problem.startswith(problem))
            with pytest.raises(Overloaded, match="serves 'another'"):
                await made.pool.open(request("n=1"), "r")

    run(body)


def test_a_worker_that_does_not_know_this_proxys_key_is_told_nothing(
    machine: Machine, tmp_path: Path
) -> None:
    make_keys(tmp_path / "keys")

    async def body() -> None:
        async with bench(settings_of(tmp_path / "keys", machine.port)) as made:
            machine.start()
            await made.until(lambda: made.worker.problem == UNKNOWN)
            assert made.worker.state == "unreachable"

    run(body)


def test_a_worker_that_this_machine_may_not_reach_is_told_once_with_what_helps(
    keys_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a Mac that refuses Hearth its local network: nobody ever answers."""
    monkeypatch.setattr(remote_module, "SILENCE_S_MAX", 0.3)
    monkeypatch.setattr(remote_module.asyncio, "open_connection", no_route)
    monkeypatch.setattr(remote_module, "hint_of", partial(hint_of, platform="darwin"))

    async def body() -> None:
        async with bench(settings_of(keys_dir, free_port())) as made:
            await made.until(lambda: made.worker.hint)
            links = {made.worker.link}
            await made.until(lambda: links.add(made.worker.link) or len(links - {None}) > 2)
            problem = made.worker.row()["problem"]
            assert problem == f"has not answered yet. {made.worker.hint}"
            assert "Local Network" in made.worker.hint
            with pytest.raises(Overloaded, match="Local Network"):
                await made.pool.open(request("n=1"), "r")
        told = [record.message for record in caplog.records if "Local Network" in record.message]
        assert len(told) == 1, "and not at each try"

    run(body)


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


def test_what_takes_a_connection_and_says_nothing_is_told_as_that() -> None:
    async def body() -> None:
        port = free_port()
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)
        async with server:
            for name in ("darwin", "linux"):
                said = await hint_of(f"tcp://127.0.0.1:{port}", name)
                assert said.startswith("It takes connections and says nothing")
        assert "Nothing listens there" in await hint_of(f"tcp://127.0.0.1:{port}", "linux")

    run(body)


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


@given(st.from_regex(r"tcp://[a-z0-9.:/@ -]{0,12}:[0-9]{0,6}", fullmatch=True))
def test_what_is_accepted_can_be_connected_to(endpoint: str) -> None:
    """Else it would be an error amid the service, not a refusal at the start."""
    try:
        check_endpoints([endpoint])
    except StartError:
        return
    context = zmq.Context.instance()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)


def test_workers_on_other_machines_need_keys_and_no_worker_here(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "none", 5000)
    with pytest.raises(StartError, match=r"hearth keys"):
        RemoteWorkers(settings, WorkerPool(), MODELS)
    with pytest.raises(StartError, match="WORKERS is 0 and WORKER_ENDPOINTS is empty"):
        load_settings({"WORKERS": "0"}, None)
    assert RemoteWorkers(load_settings({}, None), WorkerPool(), MODELS).workers == []


def test_ids_follow_those_of_this_machines_workers(keys_dir: Path) -> None:
    settings = settings_of(keys_dir, 5000, 5001, WORKERS="2")
    workers = RemoteWorkers(settings, WorkerPool(), MODELS).workers
    assert [worker.worker_id for worker in workers] == [2, 3]
