"""Rows of a batch, packed or on trunks, beside the same rows alone: what they hold and attend."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx_vlm.models.cache as vlm
import numpy as np
import pytest
from hypothesis import given, strategies as st
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from hearth.worker.engine.decode.batch import batch_kind, keeps_plain_rows, merge_caches, take_row
from hearth.worker.engine.decode.shared_trunk import (
    LayerTrunk,
    TailKVCache,
    Trunk,
    can_stand_on_trunk,
    copy_trunk_rows,
    merge_on_trunks,
)
from hearth.worker.engine.decode.trunk_attention import attend_with_trunks

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")

HEADS, WIDTH = 2, 32
TRUNK_LENGTHS = (40, 25)
SCALE, CLOSE = 0.2, 1e-5
PACKED = {"group_size": 32, "bits": 8}
JOINING = st.tuples(st.sampled_from([None, 0, 1]), st.integers(1, 300))
TURNS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.lists(JOINING, min_size=1, max_size=3)),
        st.tuples(st.just("keep"), st.lists(st.integers(0, 5), unique=True)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    max_size=8,
)


def rows(seed: int, count: int) -> tuple[mx.array, mx.array]:
    """Return K and V (1, heads, count, width) of some tokens."""
    chance = np.random.default_rng(seed)
    shape = (1, HEADS, count, WIDTH)
    return tuple(mx.array(chance.standard_normal(shape, dtype=np.float32)) for _ in range(2))  # type: ignore[return-value]


def lone(trunk: int | None, seed: int, count: int, made: Any = KVCache, **how: int) -> Any:
    """Return a cache of `count` own tokens behind those of trunk number `trunk`."""
    cache = made(**how)
    if trunk is not None:
        cache.update_and_fetch(*rows(1000 + trunk, TRUNK_LENGTHS[trunk]))
    cache.update_and_fetch(*rows(seed, count))
    return cache


def packed(seed: int, count: int, made: Any = QuantizedKVCache) -> Any:
    return lone(None, seed, count, made, **PACKED)


def held(cache: Any) -> list[np.ndarray[Any, Any]]:
    """Return what a lone cache holds, without spare room."""
    parts = [each if isinstance(each, tuple) else (each,) for each in (cache.keys, cache.values)]
    return [np.array(array[..., : cache.offset, :]) for part in parts for array in part]


def same(one: Any, other: Any) -> bool:
    return one.offset == other.offset and all(map(np.array_equal, held(one), held(other)))


class Batch:
    """One layer of a batch beside the same rows alone: packed, or each on a trunk or on none."""

    def __init__(self, is_packed: bool) -> None:
        self._is_packed = is_packed
        self._trunks = [Trunk(length) for length in TRUNK_LENGTHS]
        self._seed = 0
        self.layer: Any = None
        self.alone: list[tuple[int | None, Any]] = []

    def join(self, joining: Sequence[tuple[int | None, int]]) -> None:
        made = [(trunk, self._next(), count) for trunk, count in joining]
        if self._is_packed:
            self.alone += [(None, packed(seed, count)) for _, seed, count in made]
            (layer,) = merge_caches([[packed(seed, count)] for _, seed, count in made])
        else:
            self.alone += [(each[0], lone(*each)) for each in made]
            on = [None if trunk is None else self._trunks[trunk] for trunk, _, _ in made]
            layer = merge_on_trunks([lone(*each) for each in made], on, 0)
        if self.layer is None:
            self.layer = layer
        else:
            self.layer.extend(layer)

    def keep(self, kept: list[int]) -> None:
        kept = [row for row in kept if row < len(self.alone)]
        self.alone = [self.alone[row] for row in kept]
        if kept:
            self.layer.filter(kept)
        else:
            self.layer = None

    def step(self, count: int, repeats: int = 3, sinks: mx.array | None = None) -> None:
        """Feed `count` tokens to each row at once; each attends what it does alone."""
        if not self.alone:
            return
        new = [rows(self._next(), count) for _ in self.alone]
        shape = (len(new), HEADS * repeats, count, WIDTH)
        # Copies: upstream scales the queries that it is given in place.
        queries = np.random.default_rng(self._seed).standard_normal(shape, np.float32)
        mask = self.layer.make_mask(count)
        joined = [mx.concatenate([*each]) for each in zip(*new, strict=True)]
        every = self.layer.update_and_fetch(*joined)
        attend = scaled_dot_product_attention if self._is_packed else attend_with_trunks
        together = attend(mx.array(queries), *every, self.layer, SCALE, mask, sinks)
        for row, (_, cache) in enumerate(self.alone):
            mask = cache.make_mask(count, return_array=self._is_packed, window_size=None)
            own = cache.update_and_fetch(*new[row])
            asked = mx.array(queries[row : row + 1])
            alone = scaled_dot_product_attention(asked, *own, cache, SCALE, mask, sinks)
            assert np.abs(np.array(together[row] - alone[0])).max() < CLOSE, row

    def check(self) -> None:
        for row, (trunk, cache) in enumerate(self.alone):
            left = [take_row(self.layer, row)]
            if trunk is not None:
                assert left[0].trunk is self._trunks[trunk].layers[0], "by reference"
            copy_trunk_rows(left)
            assert same(left[0], cache), row
        if self.alone:
            assert self.layer.offset.tolist() == [cache.offset for _, cache in self.alone]

    def _next(self) -> int:
        self._seed += 1
        return self._seed


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "on trunks"])
@given(turns=TURNS)
def test_rows_attend_and_hold_what_they_do_alone(is_packed: bool, turns: list[Any]) -> None:
    batch = Batch(is_packed)
    batch.join([(0, 255), (0, 3)])
    for what, how in turns:
        getattr(batch, what)(how)
        batch.check()


@pytest.mark.parametrize("repeats", [1, 3], ids=["each its own", "shared by three"])
def test_sinks_are_attended_beside_a_trunk(repeats: int) -> None:
    batch = Batch(is_packed=False)
    batch.join([(0, 30), (None, 7), (0, 1)])
    sinks = mx.array(np.linspace(-1, 2, HEADS * repeats, dtype=np.float32))
    for count in (1, 4):
        batch.step(count, repeats, sinks)


@pytest.mark.parametrize("shorter", [30, 40, 45])
def test_rows_are_put_on_another_trunk_without_being_whole_in_between(shorter: int) -> None:
    first, second = Trunk(40), Trunk(shorter)
    alone = [lone(0, 7, 12), lone(0, 7, 12)]
    alone[0].trim(3)  # they begin with 49 tokens alike
    copies = merge_on_trunks(alone, [None, None], 0)
    layer = merge_on_trunks([copies.extract(row) for row in range(2)], [first, first], 0)
    layer = merge_on_trunks([layer.extract(row) for row in range(2)], [second, second], 0)
    for row, cache in enumerate(alone):
        assert layer.extract(row).trunk is second.layers[0]
        assert same(layer.extract(row).whole(), cache)
    assert second.layers[0].length == shorter
    assert layer.tails.size() == 52 - shorter


@pytest.mark.parametrize("made", [KVCache, vlm.KVCache, QuantizedKVCache, vlm.QuantizedKVCache])
def test_a_row_comes_back_in_the_class_that_it_came_in(made: type) -> None:
    if "Quantized" in made.__name__:
        (layer,) = merge_caches([[packed(1, 5, made)], [packed(2, 3, made)]])
        left = [layer.extract(0), layer.extract(1)]
    else:
        layer = merge_on_trunks([lone(0, 1, 5, made), lone(0, 2, 3, made)], [Trunk(40), None], 0)
        left = [layer.extract(0).whole(), layer.extract(1)]
    assert {type(row) for row in left} == {made}


def test_a_batch_and_the_caches_it_was_made_of_do_not_write_into_each_other() -> None:
    cache, other = packed(1, 256), packed(1, 256)
    (layer,) = merge_caches([[cache]])
    layer.update_and_fetch(*rows(2, 1))
    cache.update_and_fetch(*rows(3, 1))
    other.update_and_fetch(*rows(2, 1))
    assert same(layer.extract(0), other) and not same(layer.extract(0), cache)


def test_the_bytes_of_a_layer_are_those_of_the_tails() -> None:
    trunk = Trunk(40)
    layer = merge_on_trunks([lone(0, 1, 5), lone(0, 2, 5)], [trunk, trunk], 0)
    assert layer.nbytes == 2 * 5 * HEADS * WIDTH * 4 * 2
    assert trunk.nbytes == 40 * HEADS * WIDTH * 4 * 2


def test_only_layers_of_plain_rows_stand_on_a_trunk_and_packed_ones_share_no_batch_with_them() -> (
    None
):
    plain, window = lone(None, 1, 4), RotatingKVCache(8)
    tail = TailKVCache(plain, LayerTrunk(*rows(1, 4)))
    assert [can_stand_on_trunk(each) for each in (plain, tail, window)] == [True, True, False]
    assert batch_kind([tail]) == batch_kind([plain]) != batch_kind([packed(1, 4)])
    assert batch_kind([packed(1, 4)]) == batch_kind([packed(2, 9)])
    assert keeps_plain_rows(batch_kind([window, plain]))
    assert not keeps_plain_rows(batch_kind([packed(1, 4)])), "packed rows stand on none"
    with pytest.raises(AssertionError, match="share no batch"):
        merge_caches([[plain], [packed(1, 4)]])


def test_a_mask_that_says_more_is_refused() -> None:
    layer = merge_on_trunks([lone(0, 1, 3)], [Trunk(40)], 0)
    tails = layer.tails.keys_and_values()
    for mask in ("causal", mx.zeros((1, 1, 1, 3))):
        with pytest.raises(NotImplementedError, match="which rows"):
            attend_with_trunks(mx.zeros((1, HEADS, 1, WIDTH)), *tails, layer, 1, mask)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="window"):
        layer.make_mask(1, window_size=8)
