"""Each operation on layers gives a follower what it gives rank 0, buffers' sizes included."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.generate import generation_stream

from hearth.worker.kv.layer_adapters import LayerMap, leaves
from hearth.worker.kv.quantise_kv import QuantFormat
from hearth.worker.kv.turboquant import TurboFormat
from hearth.worker.ranks.named_kv import format_from, handle_of, told_format
from scripts.harness.socketless_worker import Machine, loaded
from tests.helpers.ranks.replica_ranks import ReplicaRanks, ranked_machine

TOKENS = 40


@pytest.fixture(scope="module")
def lead() -> Iterator[tuple[ReplicaRanks, Machine]]:
    ranks = ReplicaRanks(loaded("qwen3", tiny=True))
    yield ranks, ranked_machine("qwen3", ranks, loaded("qwen3", tiny=True))
    ranks.close()


def filled(worker: Machine, tokens: int = TOKENS) -> list[Any]:
    cache = worker.engine.new_cache()
    worker.layers.reserve(cache, tokens)
    worker.engine.prefill(cache, list(range(7, 7 + tokens)))
    return cache


def followed(ranks: ReplicaRanks, cache: list[Any]) -> list[Any]:
    ranks.settle()
    return ranks.followers[0].follower.kv.caches[handle_of(cache)]


def assert_same(own: list[Any], theirs: list[Any]) -> None:
    for ours, other in zip(leaves(own), leaves(theirs), strict=True):
        assert (ours.offset, ours.keys.shape) == (other.offset, other.keys.shape)
        assert mx.array_equal(ours.keys[..., : ours.offset, :], other.keys[..., : ours.offset, :])


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(2049, 2300), has_room=st.booleans())
def test_a_buffer_grows_by_as_much_as_rank_0s(
    lead: tuple[ReplicaRanks, Machine], rows: int, has_room: bool
) -> None:
    ranks, worker = lead
    with mx.stream(generation_stream):
        cache = filled(worker)
        worker.layers.has_room = lambda _nbytes: has_room
        worker.layers.reserve(cache, 2048)  # a quarter of that is more than a step
        worker.layers.reserve(cache, rows)
    assert_same(cache, followed(ranks, cache))


@settings(max_examples=10, deadline=None)
@given(cut=st.integers(1, TOKENS - 1), part=st.integers(1, TOKENS), packs=st.booleans())
def test_rows_come_back_from_what_is_kept_and_from_a_live_cache(
    lead: tuple[ReplicaRanks, Machine], cut: int, part: int, packs: bool
) -> None:
    ranks, worker = lead
    layers, form = worker.layers, QuantFormat(8, 32) if packs else None
    with mx.stream(generation_stream):
        source, target = filled(worker), worker.engine.new_cache()
        kept = layers.copy_rows(source, 0, cut, form)
        whole, some = layers.kept_rows(kept), layers.kept_rows(kept, min(part, cut))
        rest = layers.rows(source, cut, TOKENS)
        count = cut + min(part, cut) + TOKENS - cut
        layers.put_rows(target, [whole, some, rest], count, count + 5)
        assert_same(target, followed(ranks, target))
        layers.trim(target, cut)
        assert_same(target, followed(ranks, target))


def test_rows_that_are_evicted_before_they_are_used_are_there_on_every_rank(
    lead: tuple[ReplicaRanks, Machine],
) -> None:
    ranks, worker = lead
    layers = worker.layers
    with mx.stream(generation_stream):
        source, target = filled(worker), worker.engine.new_cache()
        kept = layers.copy_rows(source, 0, TOKENS, None)
        run = layers.kept_rows(kept)
        del kept
        layers.trim(source, TOKENS - 1)  # tells what was let go of by now
        layers.put_rows(target, [run], TOKENS, TOKENS)
    assert_same(target, followed(ranks, target))


def test_a_follower_knows_what_a_step_costs(lead: tuple[ReplicaRanks, Machine]) -> None:
    ranks, worker = lead
    cost = dataclasses.replace(worker.engine.decoder.cost, row_bytes=1 / 3, window=7)
    worker.engine.decoder.cost = cost
    worker.engine.decoder.step()
    ranks.settle()
    assert ranks.followers[0].follower.engine.decoder.cost == cost


@given(
    st.none()
    | st.builds(QuantFormat, st.sampled_from([4, 8]), st.sampled_from([32, 64]))
    | st.builds(
        TurboFormat, st.sampled_from([2.0, 3.5]), st.sampled_from([mx.float32, mx.bfloat16])
    )
)
def test_a_format_that_is_told_is_the_same_format(form: Any) -> None:
    assert format_from(told_format(form)) == form


def test_layers_of_no_follower_are_mapped_as_those_of_one_rank(
    lead: tuple[ReplicaRanks, Machine],
) -> None:
    _, worker = lead
    with mx.stream(generation_stream):
        alone = LayerMap(filled(worker))
    assert worker.layers.layout == alone.layout
    assert worker.layers.row_bytes == alone.row_bytes
