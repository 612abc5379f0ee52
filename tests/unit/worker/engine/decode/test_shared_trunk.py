"""Rows on a trunk beside the same rows alone: what they hold, and what they attend."""

import importlib
from typing import Any

import mlx.core as mx
import mlx_vlm.models.cache as vlm
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mlx_lm.models import base
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache

from hearth.worker.engine.decode import trunk_attention
from hearth.worker.engine.decode.batch_caches import (
    batch_kind,
    keeps_plain_rows,
    take_row,
)
from hearth.worker.engine.decode.shared_trunk import (
    LayerTrunk,
    TailKVCache,
    Trunk,
    can_stand_on_trunk,
    merge_on_trunks,
    whole_rows,
)
from hearth.worker.engine.decode.trunk_attention import attend_with_trunks, reach_trunks
from hearth.worker.engine.prefill_lengths import network_of
from scripts.harness.socketless_worker import loaded

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter has all zero values")

HEADS, WIDTH = 2, 16
TRUNK_LENGTHS = (40, 25)
CLOSE = 1e-5


def rows(seed: int, count: int) -> tuple[mx.array, mx.array]:
    """Return K and V (1, heads, count, width) of some tokens."""
    chance = np.random.default_rng(seed)
    shape = (1, HEADS, count, WIDTH)
    return tuple(mx.array(chance.standard_normal(shape, dtype=np.float32)) for _ in range(2))  # type: ignore[return-value]


def lone(trunk: int | None, seed: int, count: int, made: type = KVCache) -> Any:
    """Return a cache of `count` own tokens behind those of trunk number `trunk`."""
    cache = made()
    if trunk is not None:
        cache.update_and_fetch(*rows(1000 + trunk, TRUNK_LENGTHS[trunk]))
    cache.update_and_fetch(*rows(seed, count))
    return cache


def same(one: Any, other: Any) -> bool:
    return one.offset == other.offset and all(
        np.array_equal(
            getattr(one, name)[..., : one.offset, :], getattr(other, name)[..., : other.offset, :]
        )
        for name in ("keys", "values")
    )


class Batch:
    """One layer of a batch beside the same rows alone, each on one of two trunks or on none."""

    def __init__(self) -> None:
        self.trunks = [Trunk(length) for length in TRUNK_LENGTHS]
        self.layer: Any = None
        self.alone: list[tuple[int | None, Any]] = []
        self.seed = 0

    def join(self, joining: list[tuple[int | None, int]]) -> None:
        alone = [(trunk, lone(trunk, self._next(), count)) for trunk, count in joining]
        layer = merge_on_trunks(
            [copied(cache) for _, cache in alone],
            [None if trunk is None else self.trunks[trunk] for trunk, _ in alone],
            0,
        )
        if self.layer is None:
            self.layer = layer
        else:
            self.layer.extend(layer)
        self.alone += alone

    def keep(self, kept: list[int]) -> None:
        self.alone = [self.alone[row] for row in kept]
        if kept:
            self.layer.filter(kept)
        else:
            self.layer = None

    def step(self, count: int) -> None:
        for _ in range(count if self.alone else 0):
            new = [rows(self._next(), 1) for _ in self.alone]
            queries = np.random.default_rng(self.seed).standard_normal(
                (len(self.alone), HEADS * 3, 1, WIDTH), np.float32
            )
            mask = self.layer.make_mask(1)
            tails = self.layer.update_and_fetch(
                *(mx.concatenate([*each]) for each in zip(*new, strict=True))
            )
            together = attend_with_trunks(mx.array(queries), *tails, self.layer, 0.3, mask)
            for row, (_, cache) in enumerate(self.alone):
                alone = scaled_dot_product_attention(
                    mx.array(queries[row : row + 1]),
                    *cache.update_and_fetch(*new[row]),
                    cache,
                    0.3,
                    None,
                )
                assert np.abs(np.array(together[row] - alone[0])).max() < CLOSE, row

    def check(self) -> None:
        for row, (trunk, cache) in enumerate(self.alone):
            left = [take_row(self.layer, row)]
            if trunk is not None:
                assert left[0].trunk is self.trunks[trunk].layers[0], "by reference"
            whole_rows(left)
            assert same(left[0], cache), row
        if self.alone:
            assert self.layer.offset.tolist() == [cache.offset for _, cache in self.alone]

    def _next(self) -> int:
        self.seed += 1
        return self.seed


def copied(cache: Any) -> Any:
    """Return a cache of the same rows that nobody else writes into."""
    other = type(cache)()
    other.update_and_fetch(cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :])
    return other


JOINING = st.tuples(st.sampled_from([None, 0, 1]), st.integers(1, 300))


@settings(max_examples=30)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("join"), st.lists(JOINING, min_size=1, max_size=3)),
            st.tuples(st.just("keep"), st.permutations(range(6)), st.integers(0, 6)),
            st.tuples(st.just("step"), st.integers(1, 3)),
        ),
        max_size=8,
    )
)
def test_rows_on_trunks_attend_and_hold_what_they_do_alone(turns: list[Any]) -> None:
    batch = Batch()
    batch.join([(0, 255), (0, 3)])
    for what, *how in turns:
        if what == "join":
            batch.join(how[0])
        elif what == "step":
            batch.step(how[0])
        else:
            batch.keep([row for row in how[0][: how[1]] if row < len(batch.alone)])
        batch.check()


@pytest.mark.parametrize("shorter", [30, 40, 45])
def test_rows_are_put_on_another_trunk_without_being_whole_in_between(shorter: int) -> None:
    first, second = Trunk(40), Trunk(shorter)
    alone = [lone(0, 7, 12), lone(0, 7, 12)]
    alone[0].trim(3)  # they begin with 49 tokens alike
    layer = merge_on_trunks([copied(each) for each in alone], [first, first], 0)
    tails = [layer.extract(row) for row in range(2)]
    layer = merge_on_trunks(tails, [second, second], 0)
    for row, cache in enumerate(alone):
        assert layer.extract(row).trunk is second.layers[0]
        assert same(layer.extract(row).whole(), cache)
    assert second.layers[0].length == shorter
    assert layer.tails.size() == 52 - shorter


@pytest.mark.parametrize("made", [KVCache, vlm.KVCache])
def test_a_row_comes_back_in_the_class_that_it_came_in(made: type) -> None:
    trunk = Trunk(40)
    layer = merge_on_trunks([lone(0, 1, 5, made), lone(0, 2, 3, made)], [trunk, None], 0)
    assert type(layer.extract(0).whole()) is made and type(layer.extract(1)) is made


def test_the_bytes_of_a_layer_are_those_of_the_tails() -> None:
    trunk = Trunk(40)
    layer = merge_on_trunks([lone(0, 1, 5), lone(0, 2, 5)], [trunk, trunk], 0)
    assert layer.nbytes == 2 * 5 * HEADS * WIDTH * 4 * 2
    assert trunk.nbytes == 40 * HEADS * WIDTH * 4 * 2


def test_only_layers_of_plain_rows_stand_on_a_trunk() -> None:
    plain = KVCache()
    assert can_stand_on_trunk(plain) and not can_stand_on_trunk(RotatingKVCache(8))
    tail = TailKVCache(plain, LayerTrunk(*rows(1, 4)))
    assert can_stand_on_trunk(tail) and batch_kind([tail]) == batch_kind([plain])
    assert keeps_plain_rows(batch_kind([RotatingKVCache(8), plain]))
    assert not keeps_plain_rows(batch_kind([plain.to_quantized()])), "packed rows stand on none"


# ---------------------------------------------------------------- attention


def attended(count: int, repeats: int, sinks: mx.array | None) -> tuple[Any, Any]:
    """Return the attention of three rows on a trunk, or none, to `count` new tokens, and alone."""
    trunk = Trunk(TRUNK_LENGTHS[0])
    alone = [lone(0, 1, 30), lone(None, 2, 7), lone(0, 3, 1)]
    layer = merge_on_trunks([copied(each) for each in alone], [trunk, None, trunk], 0)
    shape = (3, HEADS * repeats, count, WIDTH)
    queries = np.random.default_rng(0).standard_normal(shape, np.float32)
    new = [rows(10 + row, count) for row in range(3)]
    mask = layer.make_mask(count)
    tails = layer.update_and_fetch(*(mx.concatenate([*each]) for each in zip(*new, strict=True)))
    together = attend_with_trunks(mx.array(queries), *tails, layer, 0.2, mask, sinks)
    own = []
    for row, cache in enumerate(alone):
        mask = cache.make_mask(count, return_array=False, window_size=None)
        every = cache.update_and_fetch(*new[row])
        one = mx.array(queries[row : row + 1])
        own.append(scaled_dot_product_attention(one, *every, cache, 0.2, mask, sinks))
    return together, mx.concatenate(own)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "with sinks"])
@pytest.mark.parametrize("repeats", [1, 3], ids=["each its own", "shared by three"])
@pytest.mark.parametrize("count", [1, 4])
def test_several_new_tokens_see_the_trunk_and_their_tail_and_nothing_else(
    count: int, repeats: int, sinks: bool
) -> None:
    given = mx.array(np.linspace(-1, 2, HEADS * repeats, dtype=np.float32)) if sinks else None
    together, alone = attended(count, repeats, given)
    assert np.abs(np.array(together - alone)).max() < CLOSE


def test_a_mask_that_says_more_is_refused() -> None:
    layer = merge_on_trunks([lone(0, 1, 3)], [Trunk(40)], 0)
    tails = layer.tails.keys_and_values()
    for mask in ("causal", mx.zeros((1, 1, 1, 3))):
        with pytest.raises(NotImplementedError, match="which rows"):
            attend_with_trunks(mx.zeros((1, HEADS, 1, WIDTH)), *tails, layer, 1, mask)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="window"):
        layer.make_mask(1, window_size=8)


# ---------------------------------------------------------------- upstream's models


def test_a_module_is_reached_once_and_given_back() -> None:
    network = network_of(loaded("llama"))
    module: Any = importlib.import_module(type(network).__module__)
    module.scaled_dot_product_attention = base.scaled_dot_product_attention
    take_back = reach_trunks(network)
    replaced = module.scaled_dot_product_attention
    assert replaced is not base.scaled_dot_product_attention
    reach_trunks(network)()
    assert module.scaled_dot_product_attention is replaced, (
        "who replaced nothing takes back nothing"
    )
    take_back()
    assert module.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_attention_that_takes_no_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of(loaded("llama"))
    module: Any = importlib.import_module(type(network).__module__)
    monkeypatch.setattr(module, trunk_attention.NAME, mx.fast.scaled_dot_product_attention)
    reach_trunks(network)
    assert module.scaled_dot_product_attention is mx.fast.scaled_dot_product_attention
