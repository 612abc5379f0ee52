"""Gives workers the models that requests ask for, and empties those that nobody uses.

Which worker should have which model is decided anew each time from what is so now, so that a switch
nobody waits for any more is off by itself. The supervisor restarts the workers.
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
LOOK_S: Final = 1.0  # how late an unused model is unloaded
LOOK_SOON_S: Final = 0.05  # how late a model that is waited for gets a worker that fell idle
LOAD_AGAIN_S: Final = 60.0  # a model that could not be loaded is not tried again for so long
UNLOADED: Final = ""  # the goal of a worker that is to give its model up for no other
TURN_S: Final = 30.0  # a model in use keeps its worker this long once another one is asked for
KEEP_S: Final = 2.0  # an agent's pause between two requests: its model is still in use

# ------------------------------------------------------------ the policy: no process, no clock


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """A worker as the policy sees it. Times are those of `awake_s`."""

    worker_id: int
    model: str  # that it has, is getting, or had last
    is_ready: bool = False  # it serves; what does not, and is not empty, is on its way to
    is_empty: bool = False  # it has no process
    is_failing: bool = False  # it could not load its model, and waits before it tries again
    load: int = 0  # requests that it holds
    ready_at: float = 0.0
    used_at: float = 0.0  # when it last took or ended a request
    is_unwanted: bool = False  # somebody wished its model unloaded, and nobody asked for it since


def wanted_models(
    workers: Sequence[WorkerModel],
    requests: Iterable[ModelRequest],
    now: float,
    unload_s: float = 0.0,
) -> dict[int, str]:
    """Return, by worker, the model that it should have instead of its own, or UNLOADED.

    Such a worker takes no new requests; it changes once it holds none, and an empty one at once.
    The model that was asked for first comes first. `unload_s`: how long a model stays unused
    before its worker is emptied; 0 = for ever.
    """
    assert len({worker.worker_id for worker in workers}) == len(workers), workers
    given: dict[int, str] = {}
    waiting = sorted(requests, key=lambda request: request.since)
    first: dict[str, ModelRequest] = {}
    for request in waiting:
        first.setdefault(request.model, request)
    for request in first.values():
        if request.model not in _present(workers, given):
            worker = _worker_for(request, workers, given, now)
            if worker is not None:
                given[worker.worker_id] = request.model
    _spread(workers, waiting, given)
    for worker in workers:
        is_wanted = worker.model in first  # it has just come: who waits for it has not seen it yet
        unused_s = 0.0 if worker.is_unwanted else unload_s or math.inf
        if worker.worker_id not in given and not is_wanted and _is_idle(worker, now, unused_s):
            given[worker.worker_id] = UNLOADED
    return given


def _present(workers: Sequence[WorkerModel], given: dict[int, str]) -> set[str]:
    """Return the models that are served or on their way; one that has to go counts as well."""
    return {worker.model for worker in workers if not worker.is_empty} | set(given.values())


def _worker_for(
    request: ModelRequest, workers: Sequence[WorkerModel], given: dict[int, str], now: float
) -> WorkerModel | None:
    """Return the worker to give up for `request`; None while each of them is in use.

    A model is in use for KEEP_S after each request, and for TURN_S at the most. Those that serve
    nobody come first, then those whose model another has too, then the least busy, then those that
    were not used for longest.
    """
    models = [worker.model for worker in workers if not worker.is_empty]
    free = [
        worker
        for worker in workers
        if worker.worker_id not in given
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
    workers: Sequence[WorkerModel], waiting: Sequence[ModelRequest], given: dict[int, str]
) -> None:
    """Give workers that are still empty to models with more requests than workers."""
    for worker in workers:
        if not worker.is_empty or worker.worker_id in given:
            continue
        for model in dict.fromkeys([worker.model, *sorted(_present(workers, given))]):
            have = [row for row in workers if row.model == model and not row.is_empty]
            coming = sum(goal == model for goal in given.values())
            wanted = sum(row.load for row in have) + sum(row.model == model for row in waiting)
            if have and wanted > len(have) + coming:
                given[worker.worker_id] = model
                break


# ------------------------------------------------------------ what carries it out


@dataclass(slots=True)
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
        pool.host = self
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
                limit_s = LOOK_SOON_S if self._pool.waiting else LOOK_S
                async with asyncio.timeout(limit_s):
                    await self._nudge.wait()

    def arrange(self) -> None:
        now = awake_s()
        requests = [
            ModelRequest(request.model or self._default.name, request.since)
            for request in self._pool.waiting
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
            if worker.is_failing:  # who waits for its model takes its worker from no other one
                self._failures[worker.model.name].until = awake_s() + LOAD_AGAIN_S
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
        return LOAD_WAIT_S_MAX if self._workers and not comes_unasked else READY_WAIT_S_MAX

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
