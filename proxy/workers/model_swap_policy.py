"""Decides which worker should have which model, and when it changes.

A decision and nothing else: no process, no clock. It is made anew each time from what is so now, so
that a switch nobody waits for any more is off by itself.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hearth.proxy.pool.waiting_requests import ModelRequest

UNLOADED: Final = ""  # the goal of a worker that is to give its model up for no other
TURN_S: Final = 30.0  # a model in use keeps its worker this long once another one is asked for
KEEP_S: Final = 2.0  # an agent's pause between two requests: its model is still in use


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

    Those that serve nobody first, then those whose model another has too, then the least busy, then
    those that were not used for longest.
    """
    models = [worker.model for worker in workers if not worker.is_empty]
    free = [
        worker
        for worker in workers
        if worker.worker_id not in given and (_is_vacant(worker) or _is_due(worker, request, now))
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


def _is_due(worker: WorkerModel, request: ModelRequest, now: float) -> bool:
    """Return whether the worker's own model is out of use, or has had its turn."""
    has_had_turn = now >= max(request.since, worker.ready_at) + TURN_S
    return _is_idle(worker, now, KEEP_S) or (worker.is_ready and has_had_turn)


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
