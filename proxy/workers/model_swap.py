"""Gives workers the models that requests ask for, and unloads unused models.

The policy decides each time anew, from the present state, which worker should have which model. So
a planned switch is dropped once no request waits for its model. The supervisor restarts workers.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hearth.proxy.pool.worker_pool import LOADING, READY_WAIT_S_MAX, ModelRequest, WorkerPool
from hearth.proxy.request.model_names import ServedModel
from hearth.proxy.workers.supervisor import Supervisor, WorkerProcess
from hearth.shared.errors import RETRY_AFTER_S_MAX, Overloaded, RequestError
from hearth.shared.suspending_clock import awake_s

log = logging.getLogger(__name__)

LOAD_WAIT_S_MAX: Final = 240.0  # clients wait 300 s and more for a first byte
LOOK_S: Final = 1.0  # time between two decisions of the policy
LOOK_SOON_S: Final = 0.05  # the same while requests wait for a model
LOAD_AGAIN_S: Final = 60.0  # time from a failed load to the next try
UNLOADED: Final = ""  # the goal of a worker that unloads its model and loads no other
TURN_S: Final = 30.0  # a model in use keeps its worker this long once another model is requested
KEEP_S: Final = 2.0  # an agent's pause between two requests, in which its model counts as used

# ------------------------------------------------------------ the policy: no process, no clock


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """The facts about a worker that the policy uses. Times are those of `awake_s`."""

    worker_id: int
    model: str  # model that the worker has, is loading, or had last
    is_ready: bool = False  # the worker serves; one neither ready nor empty is loading
    is_empty: bool = False  # the worker has no process
    is_failing: bool = False  # the load failed, and the next try is not due yet
    load: int = 0  # requests at the worker
    ready_at: float = 0.0
    used_at: float = 0.0  # when a request last began or ended
    is_unwanted: bool = False  # a client asked to unload the model, and no request came since


def wanted_models(
    workers: Sequence[WorkerModel],
    requests: Iterable[ModelRequest],
    now: float,
    unload_s: float = 0.0,
) -> dict[int, str]:
    """Return the workers that should change, by id, with their next model or UNLOADED.

    Such a worker takes no new requests and changes once it holds none; an empty worker changes at
    once. The model of the oldest request comes first. `unload_s`: how long a model may stay unused
    before it is unloaded; 0 = for ever.
    """
    assert len({worker.worker_id for worker in workers}) == len(workers), workers
    goals: dict[int, str] = {}
    waiting = sorted(requests, key=lambda request: request.since)
    first: dict[str, ModelRequest] = {}
    for request in waiting:
        first.setdefault(request.model, request)
    for request in first.values():
        if request.model not in _present(workers, goals):
            worker = _worker_for(request, workers, goals, now)
            if worker is not None:
                goals[worker.worker_id] = request.model
    _spread(workers, waiting, goals)
    for worker in workers:
        is_wanted = worker.model in first  # just loaded: the requests for the model still wait
        unused_s = 0.0 if worker.is_unwanted else unload_s or math.inf
        if worker.worker_id not in goals and not is_wanted and _is_idle(worker, now, unused_s):
            goals[worker.worker_id] = UNLOADED
    return goals


def _present(workers: Sequence[WorkerModel], goals: dict[int, str]) -> set[str]:
    """Return the models that are loaded, loading or about to be; one about to go counts too."""
    return {worker.model for worker in workers if not worker.is_empty} | set(goals.values())


def _worker_for(
    request: ModelRequest, workers: Sequence[WorkerModel], goals: dict[int, str], now: float
) -> WorkerModel | None:
    """Return the worker that should load the model of `request`; None while all are in use.

    A model counts as used for KEEP_S after each request, but for at most TURN_S once another model
    is requested. Workers without a model come first, then those whose model another worker has too,
    then the least busy, then the least recently used.
    """
    models = [worker.model for worker in workers if not worker.is_empty]
    free = [
        worker
        for worker in workers
        if worker.worker_id not in goals
        and (
            _is_vacant(worker)
            or _is_idle(worker, now, KEEP_S)
            or (worker.is_ready and now >= max(request.since, worker.ready_at) + TURN_S)
        )
    ]
    return min(
        free,
        key=lambda worker: (
            *(not _is_vacant(worker), models.count(worker.model) < 2, worker.load),
            *(worker.used_at, worker.worker_id),
        ),
        default=None,
    )


def _is_vacant(worker: WorkerModel) -> bool:
    return worker.is_empty or worker.is_failing


def _is_idle(worker: WorkerModel, now: float, since_s: float) -> bool:
    last = max(worker.used_at, worker.ready_at)
    return worker.is_ready and not worker.load and now - last >= since_s


def _spread(
    workers: Sequence[WorkerModel], waiting: Sequence[ModelRequest], goals: dict[int, str]
) -> None:
    """Give workers that stay empty to models that have more requests than workers."""
    for worker in workers:
        if not worker.is_empty or worker.worker_id in goals:
            continue
        for model in dict.fromkeys([worker.model, *sorted(_present(workers, goals))]):
            having = [other for other in workers if other.model == model and not other.is_empty]
            coming = sum(goal == model for goal in goals.values())
            demand = sum(other.load for other in having) + sum(
                request.model == model for request in waiting
            )
            if having and demand > len(having) + coming:
                goals[worker.worker_id] = model
                break


# ------------------------------------------------------------ the swapper


@dataclass(slots=True)
class LoadFailure:
    """Why a model could not be loaded, and the time (`awake_s`) of the next try."""

    reason: str
    until: float


class ModelSwapper:
    """Gives workers the models of `models`, of which the first is the default: the `ModelHost`.

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
        """`unload_s`: how long a model may stay unused before it is unloaded; 0 = for ever.

        `missing` returns why a model is not on this disk, "" if it may be. While the default model
        is missing, the workers stay empty.
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
        pool.host = self
        supervisor.on_early_death = self._load_failed
        self.missing_at_start = missing(self._default) if self._workers else ""
        if self.missing_at_start:
            for worker in self._workers:
                supervisor.leave_empty(worker)

    async def run(self) -> None:
        """Apply the policy again and again."""
        while True:
            self._nudge.clear()
            self.arrange()
            with contextlib.suppress(TimeoutError):
                limit_s = LOOK_SOON_S if self._pool.waiting else LOOK_S
                async with asyncio.timeout(limit_s):
                    await self._nudge.wait()

    def arrange(self) -> None:
        now = awake_s()
        requests = [
            ModelRequest(request.model or self._default.name, request.since)
            for request in self._pool.waiting
            if self._failure(request.model) is None  # a failed model would only fail again
        ]
        goals = wanted_models(
            [self._worker_model(worker) for worker in self._workers], requests, now, self._unload_s
        )
        for worker in self._workers:
            goal, link = goals.get(worker.worker_id), worker.link
            # A worker that will change takes no new requests.
            if link is not None and goal is None and link.closed_at is not None:
                link.closed_at = None
                self._pool.wake()
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
            if worker.is_failing:  # the failed model must not soon take a worker back
                self._failures[worker.model.name].until = awake_s() + LOAD_AGAIN_S
            log.info("worker loads id=%d model=%s", worker.worker_id, goal)
            self._supervisor.move(worker, self._models[goal])

    # ------------------------------------------------------------ the pool's ModelHost

    def wanted(self) -> None:
        """See `ModelHost`."""
        self._nudge.set()

    def unload(self, model: str, api_key: str) -> None:
        """See `ModelHost`."""
        name = model or self._default.name
        links = [worker.link for worker in self._workers if worker.model.name == name]
        for link in links:
            if link is not None and not link.is_kept_for_others(api_key):
                link.is_unwanted = True
        self._nudge.set()

    def why_missing(self, model: str = "") -> str:
        """See `ModelHost`; `model` "" = the default one."""
        name = model or self._default.name
        if not self._workers or any(
            worker.model.name == name and worker.state != "unloaded" for worker in self._workers
        ):
            return ""
        return self._missing(self._models[name])

    def wait_s(self, model: str) -> float:
        """See `ModelHost`: long for a model that is loaded on request, short for a restart."""
        name = model or self._default.name
        if self._failure(model) is not None or self.why_missing(name):
            return 0.0
        having = [worker for worker in self._workers if worker.model.name == name]
        comes_unasked = having and all(
            worker.state in ("loading", "restarting", "dead") and not worker.is_asked
            for worker in having
        )
        return LOAD_WAIT_S_MAX if self._workers and not comes_unasked else READY_WAIT_S_MAX

    def unavailable_error(self, model: str) -> RequestError:
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
            return Overloaded(self._pool.unavailable_reason or LOADING)
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
        """Give a worker that could not load its model the default one; return whether it changed.

        The default model itself is tried again without end, unless another model is requested;
        requests for it wait meanwhile. If it is no longer on this disk, the worker stays empty.
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
