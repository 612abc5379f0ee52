"""The chosen grouping of rows reads nearly as little as the best of all, on real layouts.

A plan of trunks joins rows of one lineage that begin alike, and spares the most tokens.
"""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from hearth.worker.engine.decode.batch_split import (
    STAY,
    ReadCost,
    RowLength,
    plan_trunks,
    regroup,
    shared_length,
    split,
)
from hearth.worker.engine.decode.decoding_sequence import DecodingSequence
from hearth.worker.engine.decode.sampler import SamplingParams, greedy
from hearth.worker.engine.decode.shared_trunk import Trunk
from scripts.harness.layouts.model_layouts import LAYOUTS, ModelLayout

MIN = 3  # tokens of a trunk
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
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


@every_layout
@given(lengths=st.lists(LENGTH, min_size=1, max_size=7))
def test_no_grouping_of_all_reads_less(layout: ModelLayout, lengths: list[RowLength]) -> None:
    cost = layout.read_cost
    chosen = split(lengths, cost, 64)
    assert sorted(index for group in chosen for index in group) == list(range(len(lengths)))
    best = min(cost.of(groups) for groups in partitions(lengths))
    assert cost.of(of(chosen, lengths)) <= best * (1 + 1e-9)


@every_layout
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


# ---------------------------------------------------------------- trunks


def row(
    key: str, prompt: list[int], lineage: str | None = "a", answered: int = 0, trunk: object = None
) -> DecodingSequence:
    assert trunk is None or isinstance(trunk, Trunk)
    choice = SamplingParams(greedy, (), None)
    made = DecodingSequence(key, [], prompt[:], [], choice, tokens_max=9, lineage=lineage)
    made.begin(0)
    made.tokens += [0] * answered
    made.trunk = trunk
    return made


PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=9)
ROWS = st.lists(
    st.tuples(PROMPT, st.sampled_from(["a", "b", None]), st.integers(0, 2)), max_size=8
).map(lambda all: [row(str(n), *each) for n, each in enumerate(all)])


def groups_of(planned: dict[str, Trunk]) -> list[tuple[Trunk, set[str]]]:
    trunks = dict.fromkeys(planned.values())
    return [(trunk, {key for key in planned if planned[key] is trunk}) for trunk in trunks]


@given(ROWS)
def test_rows_on_one_trunk_begin_alike_and_may_share(rows: list[DecodingSequence]) -> None:
    by_key = {each.request_id: each for each in rows}
    for trunk, keys in groups_of(plan_trunks(rows, MIN)):
        assert len(keys) >= 2 and trunk.length >= MIN
        (lineage,) = {by_key[key].lineage for key in keys}
        assert lineage
        assert len({tuple(by_key[key].prompt[: trunk.length]) for key in keys}) == 1
        assert all(len(by_key[key].tokens) > trunk.length for key in keys), (
            "a tail of at least a token"
        )


@given(ROWS)
def test_no_pair_is_left_that_could_share_a_trunk(rows: list[DecodingSequence]) -> None:
    planned = plan_trunks(rows, MIN)
    alone = [each for each in rows if each.request_id not in planned and each.lineage is not None]
    for one, other in itertools.combinations(alone, 2):
        assert one.lineage != other.lineage or shared_length(one, other) < MIN


@given(ROWS, st.integers(0, 7))
def test_who_has_a_trunk_is_on_one_whoever_leaves(rows: list[DecodingSequence], left: int) -> None:
    planned = plan_trunks(rows, MIN)
    on = [each for each in rows if each.request_id != str(left)]
    for each in on:
        each.trunk = planned.get(each.request_id)
        each.tokens += [0] * 3
    again = plan_trunks(on, MIN)
    assert planned.keys() - {str(left)} <= again.keys()
    for trunk, keys in groups_of(again):
        if len(keys) == 1:
            assert planned[min(keys)] is trunk, "nobody is put on a trunk of its own"


def test_whoever_leaves_the_others_trunk_is_not_cut_anew() -> None:
    trunk = Trunk(4)
    staying = [row(str(n), [1] * 4 + [7] * 90 + [n], trunk=trunk) for n in range(3)]
    assert plan_trunks(staying, MIN) == {str(n): trunk for n in range(3)}


def test_one_that_joins_later_stands_on_the_trunk_that_is_there() -> None:
    trunk = Trunk(90)
    rows = [row(str(n), [1] * 90 + [n, 5], trunk=trunk) for n in range(2)]
    planned = plan_trunks([*rows, row("new", [1] * 90 + [1, 8])], MIN)
    assert planned == {"0": trunk, "1": trunk, "new": trunk}


def test_one_that_shares_less_has_the_trunk_cut_where_all_begin_alike() -> None:
    trunk = Trunk(90)
    rows = [row(str(n), [1] * 90 + [n, 5], trunk=trunk) for n in range(2)]
    planned = plan_trunks([*rows, row("new", [1] * 88 + [9, 9])], MIN)
    assert {each.length for each in planned.values()} == {88} and len(planned) == 3


def test_two_that_share_much_do_not_give_it_up_for_a_third_that_shares_little() -> None:
    rows = [row(str(n), [1] * 90 + [n]) for n in range(2)]
    planned = plan_trunks([*rows, row("other", [1] * 10 + [2] * 80)], MIN)
    assert planned.keys() == {"0", "1"} and planned["0"].length == 90


def test_equal_prompts_share_all_but_their_last_token() -> None:
    planned = plan_trunks([row("0", [1] * 50), row("1", [1] * 50)], MIN)
    assert planned["0"] is planned["1"] and planned["0"].length == 49


# ---------------------------------------------------------------- what a step reads


@given(
    st.lists(st.tuples(st.integers(1, 200), st.sampled_from([None, 50, 90])), min_size=1),
    st.integers(0, 40_000),
)
def test_a_trunk_is_read_once_by_all_rows_of_a_group(
    rows: list[tuple[int, int | None]], weights: int
) -> None:
    cost = ReadCost(weights, row_bytes=1)
    lengths = [RowLength(own, trunk, trunk or 0) for own, trunk in rows]
    read = sum({trunk for _, trunk in rows if trunk})
    assert cost.of([lengths]) == cost.of([[RowLength(own) for own, _ in rows]]) + read
    chosen = split(lengths, cost, 64)
    assert sorted(index for group in chosen for index in group) == list(range(len(rows)))
    if len(rows) <= 64:
        together = cost.of([[lengths[index] for index in group] for group in chosen])
        assert together <= cost.of([lengths]) * (1 + 1e-9)


def test_rows_are_put_on_a_trunk_where_that_alone_pays() -> None:
    cost = ReadCost(1_000, row_bytes=1)
    now = [[RowLength(5_000), RowLength(5_100)]]
    trunk = [RowLength(100, "t", 4_900), RowLength(200, "t", 4_900)]
    assert regroup(now, cost, 64) is None
    assert regroup(now, cost, 64, trunk) == [[0, 1]]
