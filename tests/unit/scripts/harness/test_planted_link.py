"""A planted link spoils the one operation that it was asked to spoil, and no other."""

from collections.abc import Sequence
from typing import Any

import pytest

from hearth.worker.ranks.agreed_tokens import checksum
from hearth.worker.ranks.rank_link import RankLost, RankMismatch
from scripts.harness.ranks.planted_link import Plant, PlantedLink
from scripts.harness.ranks.ranks_in_memory import ranks_in_memory

TOLD = [("new_cache", [1]), ("prefill", [1, [5, 6]]), ("trim", [1, 1]), ("step", [])]


def came(plant: Plant, after: int) -> list[tuple[str, list[Any]]]:
    """Return what a follower is told where `TOLD` is spoiled so."""
    leader, followers = ranks_in_memory(2)
    link = PlantedLink(leader, plant, after)
    for name, arguments in TOLD:
        link.tell(name, *arguments)
    followers[1].end()
    found = []
    while (operation := next_of(followers[1])) is not None:
        found.append((operation.name, operation.arguments))
    return found


def next_of(follower: Any) -> Any:
    try:
        return follower.next()
    except RankLost:
        return None


def names(told: Sequence[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in told]


def test_without_a_plant_all_is_told_as_it_was() -> None:
    assert came("none", 0) == TOLD


def test_the_first_fit_operation_is_dropped_or_told_after_the_next() -> None:
    assert names(came("dropped", 0)) == ["new_cache", "trim", "step"]
    assert names(came("order", 0)) == ["new_cache", "trim", "prefill", "step"]
    assert names(came("dropped", 2)) == ["new_cache", "prefill", "step"]


def test_a_changed_prompt_is_as_long_as_it_was() -> None:
    assert dict(came("changed", 0))["prefill"] == [1, [5, 7]]


def test_what_a_changed_prompt_witnesses_is_found() -> None:
    leader, followers = ranks_in_memory(2)
    leader.witness("prefill", 1, 2, checksum([5, 6]))
    followers[1].witness("prefill", 1, 2, checksum([5, 7]))
    with pytest.raises(RankMismatch, match="prefill"):
        leader.tell("step")
