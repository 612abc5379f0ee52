"""A live cache keeps of a forward's rows those of one branch, where they belong."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from hearth.worker.kv.layer_adapters import RewindPoint

HEADS, WIDTH = 2, 4


def rows(start: int, count: int) -> mx.array:
    """Return (1, heads, count, width) rows; each number tells which it is."""
    numbers = mx.arange(start, start + count, dtype=mx.float32)
    return mx.broadcast_to(numbers[None, None, :, None], (1, HEADS, count, WIDTH))


def filled(layer: Any, held: int, forward: int) -> Any:
    """Return the layer with rows from before a forward, and those of the forward behind them."""
    layer.update_and_fetch(rows(0, held), rows(1000, held))
    layer.update_and_fetch(rows(held, forward), rows(1000 + held, forward))
    return layer


def held_by(layer: KVCache) -> tuple[list[float], list[float]]:
    keys, values = layer.state[0][..., : layer.offset, :], layer.state[1][..., : layer.offset, :]
    assert keys.shape == values.shape == (1, HEADS, layer.offset, WIDTH)
    return np.array(keys)[0, -1, :, -1].tolist(), np.array(values)[0, 0, :, 0].tolist()


@given(
    held=st.integers(1, 300),
    forward=st.integers(1, 9).flatmap(
        lambda nodes: st.tuples(st.just(nodes), st.sets(st.integers(0, nodes - 1)))
    ),
    surplus=st.integers(0, 9),
)
def test_the_rows_of_a_path_stand_in_order_behind_all_before_and_may_be_cut(
    held: int, forward: tuple[int, set[int]], surplus: int
) -> None:
    nodes, path = forward[0], sorted(forward[1])
    layers = [filled(KVCache(), held, 1 + nodes) for _ in range(2)]
    point = RewindPoint(layers)
    point.pick(nodes, path)
    kept = [*range(held + 1), *(held + 1 + node for node in path)]
    for layer in layers:
        assert held_by(layer) == (kept, [1000 + row for row in kept])
    surplus = min(surplus, len(path))
    point.cut(surplus)
    for layer in layers:
        assert held_by(layer)[0] == kept[: len(kept) - surplus]
        layer.update_and_fetch(rows(7000, 1), rows(8000, 1))
        assert held_by(layer)[0][-1] == 7000


def test_a_branch_is_picked_beside_a_layer_that_holds_no_rows() -> None:
    layer = filled(KVCache(), 3, 4)
    RewindPoint([KVCache(), layer]).pick(3, [1])
    assert held_by(layer)[0] == [0, 1, 2, 3, 5]


def test_rows_move_in_place_and_no_buffer_is_copied() -> None:
    layer = KVCache()
    layer.update_and_fetch(
        mx.zeros((1, HEADS, 100_000, WIDTH)), mx.zeros((1, HEADS, 100_000, WIDTH))
    )
    layer.update_and_fetch(rows(0, 7), rows(0, 7))
    mx.eval(layer.state)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    RewindPoint([layer]).pick(6, [1, 4])
    mx.eval(layer.state)
    assert mx.get_peak_memory() - before < layer.keys.nbytes / 4  # type: ignore[union-attr]
    assert held_by(layer)[0][-3:] == [0, 2, 5]


def test_a_window_loses_a_drafts_end_but_has_no_branches() -> None:
    layer = filled(RotatingKVCache(max_size=4), 6, 5)
    point = RewindPoint([layer])
    with pytest.raises(AssertionError, match="a branch is of plain rows"):
        point.pick(4, [1])
    point.pick(4, [0, 1])
    assert layer.offset == 9
