"""Connects to workers on other machines and watches them; it never starts or kills a worker.

Workers are reached over tcp:// with CURVE keys. A lost connection is retried for as long as this
server runs. The worker keeps its cache on its own disk, so its conversations go to it again.
"""

import asyncio
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hearth.proxy.pool.worker_link import WorkerLink, link_health_fields
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import ServedModel
from hearth.shared.errors import StartError
from hearth.shared.macos_network_hints import refused_hint
from hearth.shared.settings import Settings
from hearth.shared.suspending_clock import awake_s
from hearth.shared.zmq_transport import PROXY_NAME, SILENCE_S_MAX, WORKER_NAME, curve_keys

log = logging.getLogger(__name__)

WATCH_S: Final = 1.0
RETRY_S: Final = 1.0  # pause after a connection that worked
REFUSED_RETRY_S: Final = 15.0  # pause after a worker that this server cannot use
CONNECT_S_MAX: Final = 3.0  # time for the plain connection of `hint_of`
_ENDPOINT: Final = re.compile(r"tcp://[A-Za-z0-9][A-Za-z0-9.-]*:([0-9]{1,5})")

# Why a connection is closed: what the worker did.
GONE: Final = "is gone"
SILENT: Final = f"has been silent for {SILENCE_S_MAX:g} s"
UNKNOWN: Final = "refuses this server's keys, or is no worker"
LOST: Final = "was lost by a bug of this server, whose log says more"

RemoteState = Literal["unreachable", "loading", "ready"]


@dataclass(slots=True)
class RemoteWorker:
    """One endpoint and the worker that answers there, across restarts. Owner: the event loop.

    Invariant: `link` is the connection to the worker's present process, None while none answers.
    """

    worker_id: int
    endpoint: str
    link: WorkerLink | None = None
    boot_id: str = ""  # names the process that answered last
    restarts: int = 0
    problem: str = "has not answered yet"  # or why the last connection was closed
    hint: str = ""  # a likely cause on this machine, and the remedy

    @property
    def state(self) -> RemoteState:
        if self.link is None or self.link.is_closed or self.link.heartbeat is None:
            return "unreachable"
        return "ready" if self.link.is_ready else "loading"

    @property
    def problem_text(self) -> str:
        return f"{self.problem}. {self.hint}" if self.hint else self.problem

    def health_fields(self) -> dict[str, Any]:
        """Return this worker's entry in /health, without the pid on the other machine."""
        return {
            "id": self.worker_id,
            "state": self.state,
            "pid": None,
            "endpoint": self.endpoint,
            "problem": self.problem_text if self.state == "unreachable" else None,
            "restarts": self.restarts,
            **link_health_fields(self.link),
        }

    def update(self) -> None:
        """Clear the problem once the worker answers, and count a restart of it."""
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
        """Give the workers ids after this machine's own; each must serve one of `models`.

        Raises:
            StartError: an endpoint is malformed, or the CURVE keys are missing.
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
        self._tasks = [asyncio.create_task(self._stay_connected(worker)) for worker in self.workers]

    def stop(self) -> None:
        """Stop watching; the pool closes the links."""
        for task in self._tasks:
            task.cancel()

    async def _stay_connected(self, worker: RemoteWorker) -> None:
        while True:
            assert worker.link is None, worker.worker_id
            link = worker.link = self._pool.connect(
                worker.worker_id, worker.endpoint, self._keys, self._models
            )
            problem = await self._until_lost(worker, link)
            self._record_problem(worker, problem, worker.hint if link.welcome is None else "")
            worker.link = None
            self._pool.disconnect(
                worker.worker_id,
                f"The worker that held this request {problem}; send the request again.",
                keeps_cache=True,
            )
            await asyncio.sleep(REFUSED_RETRY_S if link.refusal else RETRY_S)

    def _record_problem(self, worker: RemoteWorker, problem: str, hint: str) -> None:
        """Record why `worker` cannot be used now, and log it if it is new; `hint` is a remedy."""
        is_new = (problem, hint) != (worker.problem, worker.hint)
        worker.problem, worker.hint = problem, hint
        if is_new:
            log.error(
                "remote worker id=%d endpoint=%s %s",
                worker.worker_id,
                worker.endpoint,
                worker.problem_text,
            )
        self._pool.unavailable_reason = (
            f"No worker is ready: worker {worker.worker_id}, on another machine, "
            f"{worker.problem_text.rstrip('.')}."
        )

    async def _until_lost(self, worker: RemoteWorker, link: WorkerLink) -> str:
        """Wait until `link` cannot be used any more; return what the worker did."""
        broken = asyncio.create_task(link.disconnected())
        try:
            while True:
                before = awake_s()
                await asyncio.wait({broken}, timeout=WATCH_S)
                worker.update()
                if link.is_closed:
                    return link.refusal or LOST
                if broken.done():
                    return GONE if link.welcome is not None else UNKNOWN
                if awake_s() - before > 2 * WATCH_S:
                    continue  # this process was suspended: the worker's silence proves nothing
                if link.silence_s > SILENCE_S_MAX:
                    return SILENT if link.welcome is not None else worker.problem
                if link.welcome is None:
                    self._record_problem(worker, worker.problem, await hint_of(worker.endpoint))
        finally:
            broken.cancel()


async def hint_of(endpoint: str, platform: str = sys.platform) -> str:
    """Return why `endpoint` does not answer, found by a plain TCP connection, and a remedy.

    zmq retries for ever and does not report why a connection fails.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_S_MAX):
            _, writer = await asyncio.open_connection(host, int(port))
    except OSError as error:
        if isinstance(error, ConnectionRefusedError):
            hint = "Nothing listens there: `hearth worker` does not run there, or just begins."
        elif isinstance(error, TimeoutError):
            hint = "Connecting gets no answer: look at its address, its firewall and the cable."
        else:
            hint = f"Connecting gives {error.strerror or str(error)!r}."
        return refused_hint(error, platform) or hint
    writer.close()
    return "It takes connections and says nothing: it hangs, or is no worker."
