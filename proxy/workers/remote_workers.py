"""Connects to workers on other machines and watches them. It never starts or kills one.

They are reached over tcp:// with CURVE keys. One that is lost is tried again for as long as this
server runs; it keeps what it computed on its own disk, so what it was sent is sent to it again.
"""

import asyncio
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hearth.proxy.pool.worker_link import WorkerLink, link_row
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import ServedModel
from hearth.shared.errors import StartError
from hearth.shared.macos_network_hints import refused_hint
from hearth.shared.settings import Settings
from hearth.shared.suspending_clock import awake_s
from hearth.shared.zmq_transport import PROXY_NAME, SILENCE_S_MAX, WORKER_NAME, curve_keys

log = logging.getLogger(__name__)

WATCH_S: Final = 1.0
RETRY_S: Final = 1.0  # after a line that was good
REFUSED_RETRY_S: Final = 15.0  # after a peer that we cannot work with
CONNECT_S_MAX: Final = 3.0  # of a connection that only finds out why there is none
_ENDPOINT: Final = re.compile(r"tcp://[A-Za-z0-9][A-Za-z0-9.-]*:([0-9]{1,5})")

# What a worker did whose line is given up.
GONE: Final = "is gone"
SILENT: Final = f"has been silent for {SILENCE_S_MAX:g} s"
UNKNOWN: Final = "refuses this server's keys, or is no worker"
LOST: Final = "was lost by a bug of this server, whose log says more"

RemoteState = Literal["unreachable", "loading", "ready"]


@dataclass(slots=True)
class RemoteWorker:
    """One endpoint, where one start of a worker after another answers. Owner: the event loop.

    Invariant: `link` is the connection to the start that answers now, None while none does.
    """

    worker_id: int
    endpoint: str
    link: WorkerLink | None = None
    boot_id: str = ""  # of the start that was last heard of
    restarts: int = 0
    problem: str = "has not answered yet"  # or what it did when its line was last given up
    hint: str = ""  # what this machine's own system may have to do with it, and what helps

    @property
    def state(self) -> RemoteState:
        if self.link is None or self.link.is_closed or self.link.heartbeat is None:
            return "unreachable"
        return "ready" if self.link.is_ready else "loading"

    @property
    def told_problem(self) -> str:
        return f"{self.problem}. {self.hint}" if self.hint else self.problem

    def row(self) -> dict[str, Any]:
        """Return this worker's entry in /health. Its pid is another machine's, and not told."""
        return {
            "id": self.worker_id,
            "state": self.state,
            "pid": None,
            "endpoint": self.endpoint,
            "problem": self.told_problem if self.state == "unreachable" else None,
            "restarts": self.restarts,
            **link_row(self.link),
        }

    def look(self) -> None:
        """Note that the worker is there, and count another start of it."""
        if self.state == "unreachable":
            return
        self.problem = self.hint = ""
        welcome = self.link.welcome if self.link is not None else None
        if welcome is not None and welcome.boot_id != self.boot_id:
            self.restarts += bool(self.boot_id)
            self.boot_id = welcome.boot_id
            log.info("remote worker found id=%d endpoint=%s", self.worker_id, self.endpoint)


class RemoteWorkers:
    """Keeps a connection to each of WORKER_ENDPOINTS. Owner: the event loop."""

    def __init__(self, settings: Settings, pool: WorkerPool, models: Sequence[ServedModel]) -> None:
        """Their ids follow those of this machine's workers; each serves one of `models`.

        Raises:
            StartError: an endpoint is none, or there are no keys.
        """
        self._pool = pool
        self._models = tuple(model.name for model in models)
        self._tasks: list[asyncio.Task[None]] = []
        endpoints = settings.worker_endpoints
        for endpoint in endpoints:
            found = _ENDPOINT.fullmatch(endpoint)
            is_endpoint = found is not None and 1 <= int(found[1]) <= 65535
            if not is_endpoint or endpoints.count(endpoint) > 1:
                raise StartError(
                    f"WORKER_ENDPOINTS has {endpoint!r}; allowed is tcp://ADDRESS:PORT, each once."
                )
        self._keys = (
            curve_keys(settings.curve_keys_dir, PROXY_NAME, WORKER_NAME) if endpoints else None
        )
        self.workers = [
            RemoteWorker(number, endpoint)
            for number, endpoint in enumerate(endpoints, start=settings.workers)
        ]

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(worker)) for worker in self.workers]

    def stop(self) -> None:
        """End the watch; the pool closes the lines."""
        for task in self._tasks:
            task.cancel()

    async def _keep(self, worker: RemoteWorker) -> None:
        while True:
            assert worker.link is None, worker.worker_id
            link = worker.link = self._pool.connect(
                worker.worker_id, worker.endpoint, self._keys, self._models
            )
            problem = await self._until_lost(worker, link)
            self._note(worker, problem, worker.hint if link.welcome is None else "")
            worker.link = None
            self._pool.disconnect(
                worker.worker_id,
                f"The worker that held this request {problem}; send the request again.",
                keeps_cache=True,
            )
            await asyncio.sleep(REFUSED_RETRY_S if link.refusal else RETRY_S)

    def _note(self, worker: RemoteWorker, problem: str, hint: str) -> None:
        """Note why `worker` is of no use now, for all who ask; `hint` says what helps."""
        is_new = (problem, hint) != (worker.problem, worker.hint)  # else it is tried in vain again
        worker.problem, worker.hint = problem, hint
        if is_new:
            log.error(
                "remote worker id=%d endpoint=%s %s",
                worker.worker_id,
                worker.endpoint,
                worker.told_problem,
            )
        self._pool.why_nobody = (
            f"No worker is ready: worker {worker.worker_id}, on another machine, "
            f"{worker.told_problem.rstrip('.')}."
        )

    async def _until_lost(self, worker: RemoteWorker, link: WorkerLink) -> str:
        """Wait until `link`, the worker's line, is of no use any more; return what it did."""
        broken = asyncio.create_task(link.broken())
        try:
            while True:
                before = awake_s()
                await asyncio.wait({broken}, timeout=WATCH_S)
                worker.look()
                if link.is_closed:
                    return link.refusal or LOST
                if broken.done():
                    return GONE if link.welcome is not None else UNKNOWN
                if awake_s() - before > 2 * WATCH_S:
                    continue  # this process itself stood still: what it did not hear is no proof
                if link.silence_s > SILENCE_S_MAX:
                    return SILENT if link.welcome is not None else worker.problem
                if link.welcome is None:
                    self._note(worker, worker.problem, await hint_of(worker.endpoint))
        finally:
            broken.cancel()


async def hint_of(endpoint: str, platform: str = sys.platform) -> str:
    """Return what a plain connection to `endpoint` comes to, and what helps.

    zmq tries for ever and tells nobody why a connection fails.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_S_MAX):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            told = "Nothing listens there: `hearth worker` does not run there, or just begins."
        elif isinstance(error, TimeoutError):
            told = "Connecting gets no answer: look at its address, its firewall and the cable."
        else:
            told = f"Connecting gives {error.strerror or str(error)!r}."
        return refused_hint(error, platform) or told
    writer.close()
    return "It takes connections and says nothing: it hangs, or is no worker."
