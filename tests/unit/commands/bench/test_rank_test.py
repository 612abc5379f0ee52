"""Chance tells apart, and moves, as many lines as it does over all orders of their values."""

import itertools
from statistics import median

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.rank_test import (
    P_MAX,
    chance_moved,
    chance_told_apart,
    mann_whitney,
)

COUNTS = st.integers(1, 5)


def partings(one: int, other: int) -> list[tuple[list[int], list[int]]]:
    """Return all ways to part different values in two groups."""
    places = set(range(one + other))
    drawn = itertools.combinations(sorted(places), one)
    return [(list(each), sorted(places - set(each))) for each in drawn]


@given(COUNTS, COUNTS)
def test_the_chance_to_be_told_apart_is_that_over_all_ways(one: int, other: int) -> None:
    ways = partings(one, other)
    told = sum(mann_whitney(first, second) < P_MAX for first, second in ways)
    assert chance_told_apart(one, other) == pytest.approx(told / len(ways))


@pytest.mark.parametrize(("count", "share"), [(3, 0), (4, 2 / 70), (5, 8 / 252)])
def test_rounds_of_a_run_tell_apart_fewer_than_one_in_twenty(count: int, share: float) -> None:
    assert chance_told_apart(count, count) == pytest.approx(share)
    assert chance_told_apart(count, count) < P_MAX


def is_outside(middle: float, values: list[int]) -> bool:
    return not min(values) <= middle <= max(values)


@given(COUNTS, COUNTS)
def test_the_chance_to_have_moved_is_that_over_all_ways(one: int, other: int) -> None:
    ways = partings(one, other)
    moved = sum(
        is_outside(median(first), second) and is_outside(median(second), first)
        for first, second in ways
    )
    if one % 2 and other % 2:
        assert chance_moved(one, other) == pytest.approx(moved / len(ways))
    assert chance_moved(one, other) >= moved / len(ways) - 1e-9


def test_lines_without_values_have_no_chance() -> None:
    assert chance_moved(0, 5) == chance_moved(5, 0) == 0
    assert chance_moved(1, 1) == 1  # one round each: whatever differs has moved
