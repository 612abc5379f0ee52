"""Rows, windows and states out of real caches and back, by the kind of layer."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ConcatenateKVCache, KVCache, RotatingKVCache

from hearth.worker.engine.engine import Engine
from hearth.worker.kv.layer_adapters import LayerMap, can_rewind
from hearth.worker.kv.layer_kinds import kinds
from hearth.worker.kv.layer_kinds.layer_kind import UnknownCache
from hearth.worker.kv.layer_kinds.row_kinds import RowKind
from hearth.worker.kv.quantise_kv import KVRows, LayerRows, LayerStates, QuantFormat
from scripts.harness.socketless_worker import machine
from tests.helpers.worker.kv_prompts import prompt

HEADS, DIM, WINDOW = 2, 64, 8
EIGHT = QuantFormat(8, 64)


def rows(tokens: int, seed: int = 0) -> mx.array:
    return mx.random.normal((1, HEADS, tokens, DIM), key=mx.random.key(seed))


def feed(cache: list[Any], tokens: int, seed: int) -> None:
    """Write `tokens` tokens as a model's layers would."""
    for number, layer in enumerate(cache):
        for leaf in getattr(layer, "caches", [layer]):
            if isinstance(leaf, ArraysCache):
                leaf.cache = [rows(1, seed + number), rows(2, seed + number)]
            else:
                leaf.update_and_fetch(rows(tokens, seed), rows(tokens, seed + 50))
    mx.eval([layer.state for layer in cache])


def new_cache() -> list[Any]:
    return [
        KVCache(),
        RotatingKVCache(WINDOW),
        ArraysCache(2),
        CacheList(ArraysCache(2), KVCache()),
    ]


@pytest.fixture
def layers() -> LayerMap:
    cache = new_cache()
    feed(cache, 3, 0)
    return LayerMap(cache)


def same(one: Any, other: Any) -> bool:
    return bool(mx.array_equal(one, other))


def test_the_layout_is_read_from_the_caches(layers: LayerMap) -> None:
    assert (layers.layout.has_state, layers.layout.window, layers.layout.has_rows) == (
        True,
        WINDOW,
        True,
    )
    assert layers.row_bytes == 2 * 2 * HEADS * DIM * 4, "two layers of keys and values, fp32"


@pytest.mark.parametrize(
    "odd",
    [
        [ConcatenateKVCache()],
        [RotatingKVCache(WINDOW, keep=4)],
        [object()],
    ],
    ids=["concatenating", "keeps its first", "foreign"],
)
def test_a_cache_of_another_kind_is_refused(odd: list[Any]) -> None:
    cache = [KVCache()]
    feed(cache, 3, 0)
    with pytest.raises(UnknownCache):
        LayerMap([*cache, *odd])


def test_depth_is_what_the_layers_count(layers: LayerMap) -> None:
    cache = new_cache()
    feed(cache, 5, 1)
    feed(cache, 1, 2)
    assert layers.depth(cache) == 6


def test_copied_rows_survive_later_writes(layers: LayerMap) -> None:
    cache = new_cache()
    feed(cache, 10, 1)
    before = np.array(cache[0].keys[..., 2:6, :])
    kept = layers.copy_rows(cache, 2, 6, None)
    feed(cache, 300, 2)
    layers.trim(cache, 2)
    feed(cache, 8, 3)
    assert np.array_equal(np.array(kept.layers[0].arrays[0]), before)
    assert kept.nbytes == 4 * layers.row_bytes


def test_rows_put_back_are_what_was_taken_with_room_to_spare(layers: LayerMap) -> None:
    cache, other = new_cache(), new_cache()
    feed(cache, 10, 1)
    pieces = [layers.copy_rows(cache, 0, 4, None).layers, layers.rows(cache, 4, 9)]
    layers.put_rows(other, pieces, 9, 300)
    assert same(other[0].keys[..., :9, :], cache[0].keys[..., :9, :])
    assert same(other[3].caches[1].values[..., :9, :], cache[3].caches[1].values[..., :9, :])
    assert (other[0].offset, other[0].keys.shape[2]) == (9, 300)


def test_a_buffer_that_grows_keeps_its_rows_and_grows_by_a_share() -> None:
    cache: list[Any] = [KVCache()]
    feed(cache, 1000, 1)
    layers = LayerMap(cache)
    before = np.array(cache[0].keys[..., :1000, :])
    assert layers.reserve(cache, 1025) == 1280
    assert np.array_equal(np.array(cache[0].keys[..., :1000, :]), before)
    assert layers.reserve(cache, 1280) == 1280, "there is room"


def test_a_buffer_grows_no_more_than_it_has_to_where_memory_has_no_room_for_a_share() -> None:
    cache: list[Any] = [KVCache(), KVCache()]
    feed(cache, 10_000, 1)
    layers = LayerMap(cache)
    asked: list[int] = []
    layers.has_room = lambda nbytes: bool(asked.append(nbytes))
    capacity = cache[0].keys.shape[2]
    assert layers.reserve(cache, capacity + 1) == capacity + 256
    assert asked == [capacity // 4 * layers.row_bytes], "once, for all layers"
    assert {leaf.keys.shape[2] for leaf in cache} == {capacity + 256}


@pytest.mark.parametrize("writes", [[5], [8, 1], [20], [20, 1, 1], [3, 1], [9, 7, 1, 1, 1]])
def test_the_newest_rows_of_a_window_come_in_order_whatever_the_ring(
    layers: LayerMap, writes: list[int]
) -> None:
    cache = new_cache()
    for seed, tokens in enumerate(writes):
        feed(cache, tokens, 100 * seed)
    written = mx.concatenate([rows(n, 100 * seed) for seed, n in enumerate(writes)], axis=2)
    count = min(sum(writes), WINDOW)
    kept = layers.copy_window(cache, count)
    assert layers.window_held(cache) == count
    assert same(kept.layers[0].arrays[0], written[..., -count:, :])


def test_a_window_put_back_holds_exactly_its_size(layers: LayerMap) -> None:
    cache, other = new_cache(), new_cache()
    feed(cache, 20, 1)
    kept = layers.copy_window(cache, WINDOW)
    layers.put_window(other, [kept.layers], 20)
    assert other[1].keys.shape[2] == WINDOW
    assert (other[1].offset, vars(other[1])["_idx"]) == (20, WINDOW)


def test_a_snapshot_is_not_touched_by_what_the_layer_does_later(layers: LayerMap) -> None:
    cache, other = new_cache(), new_cache()
    feed(cache, 4, 1)
    state = layers.take_state(cache)
    first = np.array(state.layers[0][0])
    feed(cache, 4, 9)
    layers.put_state(other, state, 4)
    assert np.array_equal(np.array(other[2].cache[0]), first)
    feed(other, 4, 13)
    assert np.array_equal(np.array(state.layers[0][0]), first)


def test_eight_bits_lose_less_than_one_percent_and_take_half_the_room() -> None:
    raw = LayerRows((rows(256).astype(mx.bfloat16), rows(256, 1).astype(mx.bfloat16)))
    packed = raw.converted(EIGHT)
    back = packed.converted(None)
    for mine, theirs in zip(raw.arrays, back.arrays, strict=True):
        error = mx.abs(mine.astype(mx.float32) - theirs.astype(mx.float32)).max()
        assert error.item() < 0.01 * mx.abs(mine.astype(mx.float32)).max().item()
        assert theirs.dtype == mine.dtype
    size = sum(array.nbytes for array in packed.arrays)
    assert size < 0.56 * sum(array.nbytes for array in raw.arrays)


def test_rows_that_cannot_be_packed_stay_as_they_are() -> None:
    raw = LayerRows((mx.zeros((1, 1, 4, 40)), mx.zeros((1, 1, 4, 64))))
    assert raw.converted(EIGHT) is raw
    index_keys = LayerRows((mx.zeros((1, 1, 4, 64)),))
    assert index_keys.converted(EIGHT) is index_keys, "a choice by packed keys is another choice"


def test_what_is_kept_knows_its_size_without_another_look_at_its_arrays() -> None:
    class Array:
        looks = 0

        @property
        def nbytes(self) -> int:
            self.looks += 1
            return 10

    array: Any = Array()
    kept, state = KVRows((LayerRows((array, array), None),)), LayerStates(((array, None),))
    looks = array.looks
    assert [kept.nbytes, state.nbytes, kept.nbytes] == [20, 10, 20]
    assert array.looks == looks


class OtherKVCache(KVCache):
    """A class that upstream might add."""


def test_a_new_class_of_layer_cache_is_registered_in_one_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def new_cache(engine: Engine) -> list[Any]:
        return [OtherKVCache() for _ in machine_layers]

    machine_layers = machine("qwen3").engine.new_cache()
    monkeypatch.setattr(Engine, "new_cache", new_cache)
    with pytest.raises(UnknownCache, match="OtherKVCache"):
        machine("qwen3")
    monkeypatch.setitem(kinds.KINDS, "OtherKVCache", RowKind())
    warm, ids = machine("qwen3"), prompt("qwen3", 150, 100)
    assert can_rewind(warm.engine.new_cache()) and warm.engine.decoder.is_mergeable
    first, again = warm.ask(ids), warm.ask(ids)
    assert again.cached == again.request.query.limit
    assert again.tokens == first.tokens
