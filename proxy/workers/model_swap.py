"""Gives workers the models that requests ask for, and empties those that nobody uses.

The policy is hearth.proxy.workers.model_swap_policy; the supervisor restarts the workers.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hearth.proxy.pool.waiting_requests import LOADING, READY_WAIT_S_MAX, ModelRequest
from hearth.proxy.pool.worker_pool import WorkerPool
from hearth.proxy.request.model_names import ServedModel
from hearth.proxy.workers.model_swap_policy import (
    UNLOADED,
    WorkerModel,
    wanted_models,
)
from hearth.proxy.workers.supervisor import Supervisor, WorkerProcess
from hearth.shared.errors import RETRY_AFTER_S_MAX, Overloaded, RequestError
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)

LOAD_WAIT_S_MAX: Final = 240.0  # clients wait 300 s and more for a first byte
LOOK_S: Final = 1.0  # how late an unused model is unloaded
LOOK_SOON_S: Final = 0.05  # how late a model that is waited for gets a worker that fell idle
LOAD_AGAIN_S: Final = 60.0  # a model that could not be loaded is not tried again for so long


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """The reason that a model could not be loaded; until then (`awake_s`) it is not tried again."""

    reason: str
    until: float


class ModelSwapper:
    """The pool's `ModelHost`: gives workers `models`, of which the first is the default.

    Owner: the event loop. Invariant: a worker changes its model only while it holds no request.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        pool: WorkerPool,
        models: Sequence[ServedModel],
        unload_s: float,
        missing: Callable[[ServedModel], str] = lambda _: "",
    ) -> None:
        """`unload_s`: a model that was not used for so long is unloaded; 0 = never.

        `missing` tells why a model is not on this disk, "" where it may be. Without the default
        one the workers stay empty.
        """
        self._workers = supervisor.workers
        self._supervisor = supervisor
        self._pool = pool
        self._models = {model.name: model for model in models}
        self._default = models[0]
        self._unload_s = unload_s
        self._missing = missing
        self._failures: dict[str, LoadFailure] = {}
        self._nudge = asyncio.Event()
        pool.waiting.host = self
        supervisor.on_early_death = self._load_failed
        self.missing_at_start = missing(self._default) if self._workers else ""
        if self.missing_at_start:
            for worker in self._workers:
                supervisor.leave_empty(worker)

    async def run(self) -> None:
        """Look again and again what should change."""
        while True:
            self._nudge.clear()
            self.arrange()
            with contextlib.suppress(TimeoutError):
                limit_s = LOOK_SOON_S if self._pool.waiting.requests else LOOK_S
                async with asyncio.timeout(limit_s):
                    await self._nudge.wait()

    def arrange(self) -> None:
        now = awake_s()
        requests = [
            ModelRequest(request.model or self._default.name, request.since)
            for request in self._pool.waiting.requests
            if self._failure(request.model) is None  # else it is known to be in vain
        ]
        given = wanted_models(
            [self._worker_model(worker) for worker in self._workers], requests, now, self._unload_s
        )
        for worker in self._workers:
            goal, link = given.get(worker.worker_id), worker.link
            # A worker that is to change takes no newcomers.
            if link is not None and goal is None and link.closed_at is not None:
                link.closed_at = None
                self._pool.waiting.wake()
            elif link is not None and goal is not None and link.closed_at is None:
                link.closed_at = now
            if goal is not None and (link is None or not link.load):
                self._move(worker, goal)

    @staticmethod
    def _worker_model(worker: WorkerProcess) -> WorkerModel:
        link = worker.link if worker.state == "ready" else None
        return WorkerModel(
            worker.worker_id,
            worker.model.name,
            is_ready=link is not None,
            is_empty=worker.state == "unloaded",
            is_failing=worker.is_failing,
            load=link.load if link else 0,
            ready_at=link.ready_at if link else 0.0,
            used_at=link.uses.at if link else 0.0,
            is_unwanted=link is not None and link.is_unwanted,
        )

    def _move(self, worker: WorkerProcess, goal: str) -> None:
        assert worker.link is None or not worker.link.load, (worker.worker_id, goal)
        if goal == UNLOADED:
            log.info("worker unloads id=%d model=%s", worker.worker_id, worker.model.name)
            self._supervisor.move(worker, None)
        else:
            if worker.is_failing:  # who waits for its model takes its worker from no other one
                name = worker.model.name
                reason, until = self._failures[name].reason, awake_s() + LOAD_AGAIN_S
                self._failures[name] = LoadFailure(reason, until)
            log.info("worker loads id=%d model=%s", worker.worker_id, goal)
            self._supervisor.move(worker, self._models[goal])

    # ------------------------------------------------------------ what requests are told

    def wanted(self) -> None:
        """See `ModelHost`."""
        self._nudge.set()

    def unload(self, model: str, key: str) -> None:
        """See `ModelHost`."""
        name = model or self._default.name
        links = [worker.link for worker in self._workers if worker.model.name == name]
        for link in links:
            if link is not None and not link.is_kept_for_others(key):
                link.is_unwanted = True
        self._nudge.set()

    def why_missing(self, model: str = "") -> str:
        """See `ModelHost`; `model` "" = the default one."""
        name = model or self._default.name
        if not self._workers or any(
            row.model.name == name and row.state != "unloaded" for row in self._workers
        ):
            return ""
        return self._missing(self._models[name])

    def wait_s(self, model: str) -> float:
        """See `ModelHost`: long for a model that was asked for, short for a restart."""
        name = model or self._default.name
        if self._failure(model) is not None or self.why_missing(name):
            return 0.0
        having = [worker for worker in self._workers if worker.model.name == name]
        comes_unasked = having and all(
            row.state in ("loading", "restarting", "dead") and not row.is_asked for row in having
        )
        if self._workers and not comes_unasked:
            return LOAD_WAIT_S_MAX
        return READY_WAIT_S_MAX

    def why_nobody(self, model: str) -> RequestError:
        """See `ModelHost`."""
        failure = self._failure(model)
        name = model or self._default.name
        if missing := self.why_missing(name):
            return RequestError(
                f"{missing} The next request loads it once it is there.",
                status=503,
                code="model_unavailable",
                param="model",
            )
        if failure is not None:
            wait_s = failure.until - awake_s()
            return RequestError(
                f"The model {name!r} cannot be loaded: {failure.reason} "
                f"It is tried again when it is asked for in {wait_s:.0f} s or later.",
                status=503,
                code="model_unavailable",
                param="model",
                retry_after_s=min(RETRY_AFTER_S_MAX, math.ceil(wait_s)),
            )
        if self.wait_s(model) <= READY_WAIT_S_MAX:
            return Overloaded(self._pool.why_nobody or LOADING)
        states = "; ".join(
            f"worker {worker.worker_id} is {worker.state} with {worker.model.name!r}"
            for worker in self._workers
        )
        return Overloaded(
            f"The model {name!r} was not there within {LOAD_WAIT_S_MAX:g} s: {states}. "
            "Send the request again, or raise WORKERS so that each model keeps one."
        )

    def _failure(self, model: str) -> LoadFailure | None:
        failure = self._failures.get(model)
        return failure if failure is not None and awake_s() < failure.until else None

    def _load_failed(self, worker: WorkerProcess, reason: str) -> bool:
        """Give a worker whose model could not be loaded the default one; say whether that is it.

        The default model itself is tried again for as long as it takes, unless another one is
        asked for meanwhile. Until then nobody is turned away for it. Where it is not on this disk
        any more the worker stays empty.
        """
        now = awake_s()
        is_default = worker.model == self._default
        until = now if is_default else now + LOAD_AGAIN_S
        self._failures[worker.model.name] = LoadFailure(reason, until)
        worker.model = self._default
        if self._missing(self._default):
            self._supervisor.leave_empty(worker)
            return True
        return not is_default
