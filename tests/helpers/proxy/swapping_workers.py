"""Gives a pool whose workers change their models: real processes that load nothing."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

from hearth.proxy.pool.worker_link import AnswerStream
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import ServedModel
from hearth.proxy.workers.model_swap import ModelSwapper
from hearth.proxy.workers.supervisor import RestartRules, Supervisor
from tests.helpers.proxy.fake_worker_pool import (
    COMMAND,
    read,
    request,
    stop,
    until,
    worker_environment,
)
from tests.helpers.worker_processes.fake_worker import MISSING

MODELS: Final = (ServedModel("smollm2"), ServedModel("b", "/b"), ServedModel("broken", MISSING))


class Host:
    """A pool, its supervisor and what gives its workers their models."""

    def __init__(
        self, directory: Path, count: int, unload_s: float, stall_s: float, absent: str
    ) -> None:
        self.directory, self.absent = directory, absent  # the model that is not on this disk
        self.pool = WorkerPool()
        rules = RestartRules(MODELS[0], stall_s=stall_s, chunk_wait_s=0.5)
        self.supervisor = Supervisor(
            COMMAND, count, directory, self.pool, worker_environment(), rules
        )
        self.hosting = ModelSwapper(self.supervisor, self.pool, MODELS, unload_s, self.missing)

    def missing(self, model: ServedModel) -> str:
        return f"{model.name} is not here." if model.name == self.absent else ""

    async def open(self, model: str, script: str = "n=1", name: str = "r") -> AnswerStream:
        asked = dataclasses.replace(request(script), target=model)
        return await self.pool.open(asked, name)

    async def ask(self, model: str, script: str = "n=1", name: str = "r") -> str:
        return (await read(await self.open(model, script, name)))[0]

    def rows(self, *fields: str) -> list[Any]:
        return [
            tuple(worker.health_fields()[field] for field in fields)
            for worker in self.supervisor.workers
        ]

    async def until(self, condition: Callable[[], Any]) -> None:
        await until(condition, lambda: self.rows("state", "model"))


@contextlib.asynccontextmanager
async def host(
    directory: Path, count: int = 1, unload_s: float = 0.0, stall_s: float = 0.0, absent: str = ""
) -> AsyncIterator[Host]:
    made = Host(directory, count, unload_s, stall_s, absent)
    await made.supervisor.start()
    looking: asyncio.Task[None] | None = None
    try:
        wanted = "unloaded" if MODELS[0].name == made.absent else "ready"
        await made.until(lambda: all(row == (wanted,) for row in made.rows("state")))
        looking = asyncio.create_task(made.hosting.run())
        yield made
        assert not looking.done()
    finally:
        if looking is not None:
            looking.cancel()
        made.pool.close()
        await stop(made.supervisor)
        assert not list(directory.glob("worker*"))
