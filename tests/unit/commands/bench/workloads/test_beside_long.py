"""Gaps beside a long prompt are those that touch its reading, a stall over all of it included."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.workloads.beside_long import (
    gap_values,
    gaps_within,
)

times = st.lists(st.integers(0, 60), min_size=2, max_size=30, unique=True).map(sorted)


@given(times, st.integers(0, 60), st.integers(1, 20))
def test_the_gaps_of_a_span_are_those_that_share_a_moment_with_it(
    arrivals: list[int], began: int, length: int
) -> None:
    found = gaps_within(arrivals, began, began + length)
    moments = [began + part + 0.5 for part in range(length)]
    expected = [
        later - earlier
        for earlier, later in pairwise(arrivals)
        if any(earlier < moment < later for moment in moments)
    ]
    assert found == expected


def test_a_server_that_stops_its_streams_is_seen() -> None:
    before = [0.1 * number for number in range(11)]  # until 1.0
    stalled = [*before, 9.0, 9.1]
    values = gap_values([stalled, stalled, stalled], sent_s=1.0, first_s=8.9)
    assert values["gap_p50_s"] == values["gap_p99_s"] == pytest.approx(8.0)
    assert values["gap_over_alone"] == pytest.approx(80.0)


def test_streams_that_lose_nothing_have_the_gaps_of_before() -> None:
    steady = [0.1 * number for number in range(100)]
    values = gap_values([steady] * 3, sent_s=2.0, first_s=7.0)
    assert values["gap_over_alone"] == pytest.approx(1.0)
    assert values["gap_p50_s"] == pytest.approx(0.1)
