"""Checks which worker changes its model and when, and which keeps it."""

from typing import Any

import pytest

from hearth.proxy.pool.worker_pool import ModelRequest
from hearth.proxy.workers.model_swap import KEEP_S, TURN_S, WorkerModel, wanted_models
from tests.helpers.cases import cases

NOW = 1_000.0


def worker(
    number: int, model: str, used_s: float = NOW, ready_s: float = NOW, **fields: Any
) -> WorkerModel:
    """Return a worker that is ready, and was last used and made ready so many seconds ago."""
    times = {"used_at": NOW - used_s, "ready_at": NOW - ready_s}
    return WorkerModel(number, model, **{"is_ready": True, **times, **fields})


@pytest.mark.parametrize("case", cases("workers/model_swap_policy.yaml"))
def test_each_worker_keeps_or_changes_its_model_as_the_table_says(case: dict[str, Any]) -> None:
    places = [worker(number, **row) for number, row in enumerate(case["workers"])]
    wants = [ModelRequest(model, NOW - for_s) for model, for_s in case.get("wants", ())]
    assert wanted_models(places, wants, NOW, case.get("unload_s", 0.0)) == case["given"]


@pytest.mark.parametrize(("used_s", "given"), [(KEEP_S - 0.1, {}), (KEEP_S, {0: "b"})])
@pytest.mark.parametrize("since", ["used_s", "ready_s"])
def test_a_model_keeps_its_worker_between_two_requests_of_an_agent(
    since: str, used_s: float, given: dict[int, str]
) -> None:
    place = worker(0, "a", **{since: used_s})
    assert wanted_models([place], [ModelRequest("b", NOW)], NOW) == given


@pytest.mark.parametrize(("waited_s", "given"), [(TURN_S - 0.1, {}), (TURN_S, {0: "b"})])
def test_a_busy_model_gives_its_worker_up_after_its_turn(
    waited_s: float, given: dict[int, str]
) -> None:
    place = worker(0, "a", load=3)
    assert wanted_models([place], [ModelRequest("b", NOW - waited_s)], NOW) == given
