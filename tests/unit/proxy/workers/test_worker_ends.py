"""The wait of the supervisor for workers that it tells to end: real processes, no model."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import psutil
import pytest

from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.workers import supervisor as module
from hearth.proxy.workers.supervisor import RestartRules, Supervisor
from hearth.shared.errors import EXIT_RANK_LOST, EXIT_STUCK
from hearth.shared.suspects import Suspect, SuspectStore, running_path
from tests.helpers.proxy.fake_worker_pool import COMMAND, stop, worker_environment

pytestmark = pytest.mark.process

SLOW = {"FAKE_WORKER_END_S": "0.5"}  # longer than a wait that is not told
WAITS = "waiting for worker 0 to end its chunk (up to 15 s)"


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "SAY_AFTER_S", 0.1)
    monkeypatch.setattr(module, "END_WAIT_S", 0.1)
    caplog.set_level(logging.INFO)


@contextlib.asynccontextmanager
async def running(
    directory: Path, rules: RestartRules, environ: dict[str, str]
) -> AsyncIterator[Supervisor]:
    """One worker that is ready; whoever has it ends it."""
    pool = WorkerPool()
    environment = worker_environment() | environ
    supervisor = Supervisor(COMMAND, 1, directory, pool, environment, rules)
    await supervisor.start()
    try:
        await is_ready(supervisor)
        yield supervisor
    finally:
        pool.close()
        await stop(supervisor)


async def is_ready(supervisor: Supervisor) -> None:
    async with asyncio.timeout(60):
        while supervisor.workers[0].state != "ready":
            await asyncio.sleep(0.01)


async def test_what_workers_of_a_server_that_died_claimed_of_the_memory_is_free(
    directory: Path,
) -> None:
    """Such as those of a machine that lost power with WORKERS=4, and has WORKERS=2 now."""
    for number in (0, 2, 3):
        (directory / f"worker-{number}.weights").write_text("1000 1000")
    (directory / "worker-4.weights").mkdir()

    async with running(directory, RestartRules(), {}):
        assert [path.name for path in directory.glob("*.weights")] == ["worker-4.weights"]


async def test_a_stop_waits_says_so_once_and_kills_nobody(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(directory, RestartRules(), SLOW) as supervisor:
        await supervisor.stop()
        (worker,) = supervisor.workers
        assert worker.process is not None and worker.process.returncode == 0
        assert worker.kills == 0
    told = [row.getMessage() for row in caplog.records if row.levelno >= logging.WARNING]
    assert told == [f"{WAITS}; a second Ctrl-C kills it at once"]


async def test_one_that_does_not_end_is_killed_counted_and_the_log_says_what_was_waited_for(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = RestartRules(flush_s=0.05, chunk_wait_s=0.15)
    async with running(directory, rules, {}) as supervisor:
        (worker,) = supervisor.workers
        assert worker.pid is not None and worker.process is not None
        os.kill(worker.pid, signal.SIGSTOP)
        await supervisor.stop()
        assert await worker.process.wait() == -signal.SIGKILL
        assert worker.health_fields()["kills"] == 1
    assert (
        "worker killed id=0: it was told to end and did not in 0.3 s "
        "(waited 0.15 s for its chunk, 0.05 s for the disk, 0.1 s to end)" in caplog.text
    )


@pytest.mark.parametrize(("code", "deaths"), [(EXIT_STUCK, 0), (EXIT_RANK_LOST, 1), (70, 2)])
async def test_a_death_counts_for_who_ran_alone_by_what_it_proves(
    directory: Path, code: int, deaths: int
) -> None:
    """None that was told to end, one where a cable may have been pulled."""
    store = SuspectStore(directory / "suspects")

    environ = {"FAKE_WORKER_END_CODE": str(code)}
    async with running(directory, RestartRules(), environ) as supervisor:
        supervisor.suspects = store
        (worker,) = supervisor.workers
        row = Suspect("name", "", "read", 256, 256, is_alone=True)
        running_path(worker.socket_path).write_bytes(orjson.dumps({"r": row}))
        worker.kill(signal.SIGTERM)
        async with asyncio.timeout(10):
            while not worker.restarts:
                await asyncio.sleep(0.01)
    assert sum(row.deaths for row in store.all().values()) == deaths


@pytest.mark.parametrize("is_asked", [False, True])
async def test_what_a_worker_has_left_stopped_ends_with_it(directory: Path, is_asked: bool) -> None:
    """Such as a rank of its model: stopped, it does not see that rank 0 is gone."""
    pid_file = directory / "pid"
    child = f"sleep 600 & kill -STOP $!; echo $! >> {pid_file}; exec"
    command = ("sh", "-c", f'{child} {" ".join(COMMAND)} "$@"', "worker")

    pool = WorkerPool()
    supervisor = Supervisor(command, 1, directory, pool, worker_environment())
    await supervisor.start()
    try:
        await is_ready(supervisor)
        (left,) = map(int, pid_file.read_text().split())
        if is_asked:
            await supervisor.stop()
        else:
            pid = supervisor.workers[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            await asyncio.to_thread(psutil.Process(left).wait, 10)
    finally:
        pool.close()
        await stop(supervisor)
