"""Starts the workers, watches them, restarts them, and ends them.

A worker ends itself when its standard input reaches its end, which it does however this process
dies; a worker that hangs is killed from here.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from proxy.pool import LOADING, WorkerLink, WorkerPool, link_row
from shared.config import PROJECT_DIR
from shared.errors import EXIT_CANNOT_START
from shared.transport import SILENCE_S_MAX, ipc_endpoint

log = logging.getLogger(__name__)

WATCH_S: Final = 1.0
START_SILENCE_S_MAX: Final = 120.0  # until the first heartbeat: importing MLX from a cold disk
BACKOFF_S_MAX: Final = 30.0
TERM_WAIT_S: Final = 2.0
KILL_WAIT_S: Final = 1.0

State = Literal["loading", "ready", "dead", "restarting"]


@dataclass(slots=True)
class Worker:
    """One worker's place: the processes that fill it come and go. Owner: the event loop."""

    worker_id: int
    socket_path: Path
    endpoint: str
    process: Process | None = None
    link: WorkerLink | None = None
    restarts: int = 0
    early_deaths: int = 0  # in a row, before "ready"

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process and self.process.returncode is None else None

    @property
    def state(self) -> State:
        if self.pid is None:
            return "restarting" if self.process is not None else "dead"
        return "ready" if self.link is not None and self.link.is_ready else "loading"

    @property
    def is_silent(self) -> bool:
        """Whether it must be taken for hung."""
        if self.link is None or self.pid is None:
            return False
        limit_s = SILENCE_S_MAX if self.link.heartbeat else START_SILENCE_S_MAX
        return self.link.silence_s > limit_s

    def kill(self, signal_number: int) -> None:
        """Signal the worker and whatever it started."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: zombies
                os.killpg(self.pid, signal_number)

    def row(self) -> dict[str, Any]:
        """Return this worker's entry in /health."""
        return {
            "id": self.worker_id,
            "state": self.state,
            "pid": self.pid,
            "restarts": self.restarts,
            **link_row(self.link),
        }


class Supervisor:
    """Keeps `count` workers running. Owner: the event loop."""

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        directory: Path,
        pool: WorkerPool,
        environ: Mapping[str, str],
        flush_s: float = 0.0,
    ) -> None:
        """`command` gets `--worker-id` and `--endpoint` appended. Sockets go into `directory`.

        A worker that ends may take `flush_s` to write what it keeps.

        Raises:
            StartError: a socket's path in `directory` is too long.
        """
        self._command = tuple(command)
        self._pool = pool
        self._environ = dict(environ)
        self._end_wait_s = TERM_WAIT_S + flush_s
        self._stopping = False
        self._was_ready = False  # some worker, once: what it loaded may be loadable again
        self._tasks: list[asyncio.Task[None]] = []
        self.cannot_start = asyncio.Event()  # a worker said that restarting would not help
        self.on_change: Callable[[], None] = lambda: None  # a worker's pid changed
        paths = [directory / f"worker-{index}.sock" for index in range(count)]
        self.workers = [Worker(index, path, ipc_endpoint(path)) for index, path in enumerate(paths)]

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers if worker.pid is not None]

    async def start(self) -> None:
        """Start every worker; returns as soon as their processes exist."""
        for worker in self.workers:
            await self._spawn(worker)
        self._tasks = [asyncio.create_task(self._keep(worker)) for worker in self.workers]
        self._tasks.append(asyncio.create_task(self._watch()))

    async def _spawn(self, worker: Worker) -> None:
        worker.socket_path.unlink(missing_ok=True)  # else the new link greets the dead worker's
        worker.process = await asyncio.create_subprocess_exec(
            *self._command,
            "--worker-id",
            str(worker.worker_id),
            "--endpoint",
            worker.endpoint,
            stdin=PIPE,  # held open for as long as this process lives
            cwd=PROJECT_DIR,
            env=self._environ,
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
        worker.link = self._pool.connect(worker.worker_id, worker.endpoint)
        log.info("worker started id=%d pid=%d", worker.worker_id, worker.process.pid)
        self.on_change()

    async def _keep(self, worker: Worker) -> None:
        while True:
            assert worker.process is not None
            code = await worker.process.wait()
            if self._stopping:
                return
            self._bury(worker, code)
            if code == EXIT_CANNOT_START and not self._was_ready:
                self.cannot_start.set()
                return
            await self._respawn(worker)

    async def _respawn(self, worker: Worker) -> None:
        """Start `worker` again, for as long as it takes the system to have a process for it."""
        while True:
            await asyncio.sleep(_backoff_s(worker.early_deaths))
            worker.restarts += 1
            try:
                await self._spawn(worker)
            except OSError as error:
                worker.early_deaths += 1
                log.error("worker cannot be started id=%d: %s", worker.worker_id, error)
            else:
                return

    def _bury(self, worker: Worker, code: int) -> None:
        assert worker.link is not None
        was_ready = worker.link.heartbeat is not None and worker.link.heartbeat.state == "ready"
        self._was_ready |= was_ready
        worker.early_deaths = 0 if was_ready else worker.early_deaths + 1
        self._pool.why_nobody = LOADING
        if worker.early_deaths > 1:
            self._pool.why_nobody = (
                f"No worker is ready: worker {worker.worker_id} died {worker.early_deaths} times "
                f"while it was loading ({_how(code)}). The server's log says why."
            )
        held = worker.link.load
        how = _how(code)
        log.error("worker died id=%d how=%s requests=%d", worker.worker_id, how, held)
        self._pool.disconnect(
            worker.worker_id,
            f"The worker that held this request died ({how}) and is being restarted; "
            "send the request again.",
        )
        worker.link = None
        self.on_change()

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(WATCH_S)
            if time.monotonic() - before > 2 * WATCH_S:
                continue  # this process itself stood still: what it did not hear proves nothing
            for worker in self.workers:
                if worker.is_silent:
                    log.error("worker is silent id=%d: killed", worker.worker_id)
                    worker.kill(signal.SIGKILL)

    async def stop(self) -> None:
        """End every worker: SIGTERM, then SIGKILL where that takes too long. Removes sockets."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(worker) for worker in self.workers))
        self.remove_sockets()

    async def _end(self, worker: Worker) -> None:
        if worker.process is None:
            return
        worker.kill(signal.SIGTERM)
        try:
            await asyncio.wait_for(worker.process.wait(), self._end_wait_s)
        except TimeoutError:
            log.warning("worker does not end id=%d: killed", worker.worker_id)
            worker.kill(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):  # one stuck in a driver ends when it can
                await asyncio.wait_for(worker.process.wait(), KILL_WAIT_S)

    def kill_all(self) -> None:
        """End every worker now, waiting for nothing. Safe in a signal handler."""
        for worker in self.workers:
            worker.kill(signal.SIGKILL)

    def remove_sockets(self) -> None:
        for worker in self.workers:
            worker.socket_path.unlink(missing_ok=True)


def _backoff_s(early_deaths: int) -> float:
    """Return 0 after a death in service, else 1, 2, 4 ... BACKOFF_S_MAX."""
    return min(2.0 ** (early_deaths - 1), BACKOFF_S_MAX) if early_deaths else 0.0


def _how(code: int) -> str:
    """Return how a process ended, from its return code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
