"""Operations of rank 0 arrive in order and unchanged; what ranks compute is compared."""

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st

from hearth.shared.errors import WireError
from hearth.worker.ranks.agreed_tokens import check_sums, token_facts
from hearth.worker.ranks.leader_link import WitnessComparison
from hearth.worker.ranks.rank_link import RankMismatch, pack
from scripts.harness.ranks.ranks_in_memory import ranks_in_memory

WORDS = st.text(max_size=8)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | WORDS | st.binary(max_size=8)
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3), max_leaves=8)
TOLD = st.tuples(WORDS, st.lists(VALUES, max_size=4), st.lists(st.integers(0, 2**60), max_size=3))


@settings(max_examples=40)
@given(st.lists(TOLD, min_size=1, max_size=8))
def test_operations_arrive_as_they_were_told(told: list[tuple[str, list[Any], list[int]]]) -> None:
    leader, followers = ranks_in_memory(3)
    for name, arguments, drops in told:
        leader.send(name, *arguments, drops=drops)
    for follower in followers.values():
        came = [follower.next() for _ in told]
        assert [(each.name, each.arguments, each.drops) for each in came] == told


def test_arrays_and_objects_are_refused() -> None:
    leader, _ = ranks_in_memory(2)
    with pytest.raises(WireError):
        leader.send("put", object())


TOKEN = st.integers(1000, 200_000)


@given(chosen=st.lists(TOKEN, min_size=1, max_size=5), row=st.integers(0, 4), more=TOKEN)
def test_what_another_rank_added_to_tokens_is_found_and_no_token_is_told(
    chosen: list[int], row: int, more: int
) -> None:
    said = list(chosen)
    check_sums([(mx.array(chosen, mx.uint32), mx.array(said, mx.uint32))])
    said[row % len(said)] += more
    with pytest.raises(RankMismatch) as caught:
        check_sums([(mx.array(chosen, mx.uint32), mx.array(said, mx.uint32))])
    assert not any(str(token) in str(caught.value) for token in chosen + said)


@given(ids=st.lists(TOKEN, min_size=1, max_size=5), row=st.integers(0, 4))
def test_tokens_that_differ_by_one_are_a_mismatch_that_tells_none(ids: list[int], row: int) -> None:
    other = list(ids)
    other[row % len(ids)] += 1
    comparison = WitnessComparison([1])
    comparison.record_own(pack(token_facts(ids)))
    comparison.record(1, pack(token_facts(ids)))
    comparison.record_own(pack(token_facts(ids)))
    with pytest.raises(RankMismatch, match="step 2: rank 0 computes \\['said', ") as caught:
        comparison.record(1, pack(token_facts(other)))
    assert f"[{', '.join(map(str, ids))}]" not in str(caught.value)
