"""The chosen grouping of rows reads nearly as little as the best of all, on twelve real layouts."""

from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from hearth.worker.engine.decode.batch_split import STAY, ReadCost, RowLength, regroup, split
from scripts.harness.layouts.model_layouts import LAYOUTS, ModelLayout

LENGTH = st.one_of(st.integers(1, 300), st.integers(1, 130_000)).map(RowLength)


def partitions(rows: list[RowLength]) -> Iterator[list[list[RowLength]]]:
    """Yield every way to group `rows`."""
    if not rows:
        yield []
        return
    first, rest = rows[0], rows[1:]
    for groups in partitions(rest):
        yield [[first], *groups]
        for number, group in enumerate(groups):
            yield [*groups[:number], [first, *group], *groups[number + 1 :]]


def of(groups: list[list[int]], lengths: list[RowLength]) -> list[list[RowLength]]:
    return [[lengths[index] for index in group] for group in groups]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@given(lengths=st.lists(LENGTH, min_size=1, max_size=7))
def test_no_grouping_of_all_reads_less(layout: ModelLayout, lengths: list[RowLength]) -> None:
    cost = layout.read_cost
    chosen = split(lengths, cost, 64)
    assert sorted(index for group in chosen for index in group) == list(range(len(lengths)))
    best = min(cost.of(groups) for groups in partitions(lengths))
    assert cost.of(of(chosen, lengths)) <= best * (1 + 1e-9)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@given(groups=st.lists(st.lists(LENGTH, min_size=1, max_size=8), min_size=1, max_size=8))
def test_who_stays_together_reads_at_most_a_twentieth_more_than_the_best(
    layout: ModelLayout, groups: list[list[RowLength]]
) -> None:
    cost = layout.read_cost
    lengths = [length for group in groups for length in group]
    best = cost.of(of(split(lengths, cost, 64), lengths))
    wanted = regroup(groups, cost, 64)
    kept = groups if wanted is None else of(wanted, lengths)
    assert best <= cost.of(kept) * (1 + 1e-9)
    assert cost.of(kept) <= STAY * best * (1 + 1e-9)


@given(lengths=st.lists(LENGTH, min_size=1, max_size=20), rows_max=st.integers(1, 6))
def test_no_group_has_more_rows_than_may_be(lengths: list[RowLength], rows_max: int) -> None:
    groups = split(lengths, ReadCost(), rows_max)
    assert max(map(len, groups)) <= rows_max
    assert len(groups) == -(-len(lengths) // rows_max)
