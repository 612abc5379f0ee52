"""Checks what ranks compare of the tokens that they say, and what a difference tells to people."""

import mlx.core as mx
import pytest
from hypothesis import given, strategies as st

from hearth.worker.ranks.agreed_tokens import check_sums, said_facts
from hearth.worker.ranks.rank_link import RankMismatch, pack
from hearth.worker.ranks.transport.witness_comparison import WitnessComparison

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
    comparison.note_own(pack(said_facts(ids)))
    comparison.note(1, pack(said_facts(ids)))
    comparison.note_own(pack(said_facts(ids)))
    with pytest.raises(RankMismatch, match="step 2: rank 0 computes \\['said', ") as caught:
        comparison.note(1, pack(said_facts(other)))
    assert f"[{', '.join(map(str, ids))}]" not in str(caught.value)
