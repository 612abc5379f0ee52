"""Checks which worker changes its model and when, and which keeps it."""

from typing import Any

import pytest

from hearth.proxy.workers.model_swap_policy import (
    KEEP_S,
    TURN_S,
    UNLOADED,
    ModelRequest,
    WorkerModel,
    wanted_models,
)

NOW = 1_000.0


def ready(worker_id: int, model: str, **fields: Any) -> WorkerModel:
    return WorkerModel(worker_id, model, is_ready=True, **fields)


def want(model: str, for_s: float = 0.0) -> ModelRequest:
    return ModelRequest(model, NOW - for_s)


def test_nothing_changes_while_nobody_waits() -> None:
    assert wanted_models([ready(0, "a"), WorkerModel(1, "a", is_empty=True)], [], NOW) == {}


def test_an_idle_worker_gets_the_model_that_is_asked_for() -> None:
    assert wanted_models([ready(0, "a")], [want("b")], NOW) == {0: "b"}


def test_a_model_that_is_there_or_on_its_way_is_not_loaded_again() -> None:
    assert wanted_models([ready(0, "a", load=1), ready(1, "b", load=1)], [want("b")], NOW) == {}
    assert wanted_models([ready(0, "a"), WorkerModel(1, "b")], [want("b"), want("b")], NOW) == {}


@pytest.mark.parametrize(("used_s", "given"), [(KEEP_S - 0.1, {}), (KEEP_S, {0: "b"})])
def test_a_model_keeps_its_worker_between_two_requests_of_an_agent(
    used_s: float, given: dict[int, str]
) -> None:
    assert wanted_models([ready(0, "a", used_at=NOW - used_s)], [want("b")], NOW) == given
    assert wanted_models([ready(0, "a", ready_at=NOW - used_s)], [want("b")], NOW) == given


@pytest.mark.parametrize(("waited_s", "given"), [(TURN_S - 0.1, {}), (TURN_S, {0: "b"})])
def test_a_busy_model_gives_its_worker_up_after_its_turn(
    waited_s: float, given: dict[int, str]
) -> None:
    assert wanted_models([ready(0, "a", load=3)], [want("b", waited_s)], NOW) == given


def test_a_model_that_took_long_to_load_has_its_turn_all_the_same() -> None:
    place = ready(0, "a", load=1, ready_at=NOW - 1)
    assert wanted_models([place], [want("b", 10 * TURN_S)], NOW) == {}


def test_a_worker_that_loads_is_not_taken_away() -> None:
    assert wanted_models([WorkerModel(0, "a")], [want("b", 10 * TURN_S)], NOW) == {}


def test_a_worker_that_cannot_load_its_model_gets_another_and_is_not_asked_for_its_own() -> None:
    failing = WorkerModel(0, "a", is_failing=True)
    assert wanted_models([failing], [want("a", 10 * TURN_S), want("b")], NOW) == {0: "b"}
    assert wanted_models([failing], [want("a", 10 * TURN_S)], NOW, unload_s=1) == {}


def test_the_model_that_was_asked_for_first_comes_first() -> None:
    wants = [want("c", 1), want("b", 5), want("c", 3)]
    assert wanted_models([ready(0, "a")], wants, NOW) == {0: "b"}
    assert wanted_models([ready(0, "a"), ready(1, "a")], wants, NOW) == {0: "b", 1: "c"}


@pytest.mark.parametrize(
    ("places", "worker_id"),
    [
        ([ready(0, "a"), WorkerModel(1, "a", is_empty=True)], 1),
        ([ready(0, "c"), ready(1, "a"), ready(2, "a")], 1),  # a stays on another one
        ([ready(0, "a", used_at=NOW - 50), ready(1, "c", used_at=NOW - 90)], 1),
        ([ready(0, "a", load=1), ready(1, "c", used_at=NOW - 10)], 1),
        ([ready(0, "a", load=2), ready(1, "c", load=1)], 1),
        ([WorkerModel(0, "a"), ready(1, "c")], 1),
        ([ready(0, "c"), WorkerModel(1, "a", is_failing=True)], 1),
    ],
)
def test_the_worker_that_is_missed_least_is_taken(
    places: list[WorkerModel], worker_id: int
) -> None:
    assert wanted_models(places, [want("b", TURN_S)], NOW) == {worker_id: "b"}


def test_two_models_on_two_workers_keep_one_each() -> None:
    places = [ready(0, "a", used_at=NOW - 60), ready(1, "b", used_at=NOW - 99)]
    assert wanted_models(places, [want("a"), want("b")], NOW) == {}


def test_an_unused_model_is_unloaded_and_an_asked_one_is_not() -> None:
    places = [
        ready(0, "a", used_at=NOW - 10),
        ready(1, "b", used_at=NOW - 9),
        ready(2, "c", used_at=NOW - 99, load=1),
        WorkerModel(3, "d"),
    ]
    assert wanted_models(places, [], NOW, unload_s=10) == {0: UNLOADED}
    assert wanted_models(places, [], NOW) == {}
    assert wanted_models(places[:1], [want("b")], NOW, unload_s=10) == {0: "b"}


def test_an_empty_worker_wakes_for_its_model() -> None:
    assert wanted_models([WorkerModel(0, "a", is_empty=True)], [want("a")], NOW, unload_s=1) == {
        0: "a"
    }


def test_empty_workers_help_a_model_with_more_requests_than_workers() -> None:
    empty = [WorkerModel(1, "a", is_empty=True), WorkerModel(2, "a", is_empty=True)]
    assert wanted_models([ready(0, "a", load=1), *empty], [], NOW) == {}
    assert wanted_models([ready(0, "a", load=2), *empty], [], NOW) == {1: "a"}
    assert wanted_models([ready(0, "a", load=9), *empty], [], NOW) == {1: "a", 2: "a"}
    wants = [want("a")] * 2
    assert wanted_models(empty, wants, NOW) == {1: "a"}


def test_a_model_that_nobody_wants_any_more_is_unloaded_once_it_is_idle() -> None:
    row = ready(0, "a", used_at=NOW, is_unwanted=True)
    assert wanted_models([row], [], NOW) == {0: UNLOADED}
    assert wanted_models([ready(0, "a", used_at=NOW)], [], NOW) == {}
    assert wanted_models([ready(0, "a", load=1, is_unwanted=True)], [], NOW) == {}


def test_a_model_that_is_waited_for_is_unloaded_by_no_wish_before_it_is_used() -> None:
    row = ready(0, "a", used_at=500.0, is_unwanted=True)
    assert wanted_models([row], [want("a")], NOW, unload_s=1.0) == {}


def test_a_model_that_is_asked_for_goes_before_the_wish_to_unload() -> None:
    row = ready(0, "a", used_at=500.0, is_unwanted=True)
    assert wanted_models([row], [want("b")], NOW) == {0: "b"}
