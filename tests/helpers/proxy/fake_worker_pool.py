"""Runs a pool over fake worker processes and reads their answers."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from hearth.proxy.api.dialects import DIALECTS
from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.pool.worker_pool import LOADING, READY_WAIT_S_MAX, WorkerPool
from hearth.proxy.request.parsed_request import ParsedRequest
from hearth.proxy.workers.supervisor import Supervisor
from hearth.shared.errors import Overloaded, RequestError
from hearth.shared.wire_messages import Finished

COMMAND = (sys.executable, "-m", "tests.helpers.worker_processes.fake_worker")
ROOT = Path(__file__).parents[3]


def worker_environment() -> dict[str, str]:
    """Return what a fake worker is started with, so that it is of this checkout.

    One of another checkout, such as that which is installed, may speak another protocol: a test
    then waits for it in vain.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path}


async def until(
    condition: Callable[[], Any], told: Callable[[], Any] = lambda: "waited too long"
) -> None:
    """Wait until the condition holds; `told` is what a failure shows."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, told()
        await asyncio.sleep(0.01)


class KeptModels:
    """A pool's host whose workers keep the model that they start with."""

    def wanted(self) -> None: ...

    def wait_s(self, model: str) -> float:
        return READY_WAIT_S_MAX

    def unavailable_error(self, model: str) -> RequestError:
        return Overloaded(LOADING)

    def why_missing(self) -> str:
        return ""

    def unload(self, model: str, api_key: str) -> None: ...


def pool_without_swaps() -> WorkerPool:
    pool = WorkerPool()
    pool.host = KeptModels()
    return pool


class Bench:
    """A pool, its supervisor, and what the workers wrote down."""

    def __init__(self, directory: Path, count: int, **environ: str) -> None:
        self.log = directory / "log"
        self.pool = pool_without_swaps()
        environment = worker_environment() | {"FAKE_WORKER_LOG": str(self.log)}
        self.supervisor = Supervisor(COMMAND, count, directory, self.pool, environment | environ)

    def events(self, kind: str) -> list[dict[str, Any]]:
        rows = self.log.read_text().splitlines() if self.log.exists() else []
        return [row for row in map(json.loads, rows) if row["event"] == kind]

    async def until(self, condition: Callable[[], Any]) -> None:
        await until(
            condition, lambda: [worker.health_fields() for worker in self.supervisor.workers]
        )

    def ready_count(self) -> int:
        return sum(link.is_ready for link in self.pool.links.values())


@contextlib.asynccontextmanager
async def bench(directory: Path, count: int = 1, **environ: str) -> AsyncIterator[Bench]:
    made = Bench(directory, count, **environ)
    await made.supervisor.start()
    try:
        await made.until(lambda: made.ready_count() == count)
        yield made
    finally:
        made.pool.close()
        await stop(made.supervisor)


async def stop(supervisor: Supervisor) -> None:
    """Stop the workers; a busy machine may take longer to bury one than the supervisor waits."""
    await supervisor.stop()
    for worker in supervisor.workers:
        if worker.process is not None:
            await worker.process.wait()


def request(script: str, **fields: Any) -> ParsedRequest:
    return DIALECTS["chat"].parse(
        {"model": "m", "messages": [{"role": "user", "content": script}], **fields}
    )


async def read(answer: AnswerStream) -> tuple[str, Finished]:
    texts = []
    while not isinstance(row := await answer.next_event(), Finished):
        assert row is not None
        texts.append(row.text)
    return "".join(texts), row


async def start(made: Bench, script: str, name: str = "r") -> AnswerStream:
    return await made.pool.open(request(script), name)
