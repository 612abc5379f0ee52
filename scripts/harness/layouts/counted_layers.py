"""Stands in for the caches of a model of real size: all is counted, nothing is stored.

A live cache is a number of tokens. Rows, windows and states are MLX arrays of the true shapes and
types over a single zero (strides of 0), so that all that asks for their bytes is told the truth and
no memory is behind them. The same arrays serve for all runs of one length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache as cached
from typing import Any

import mlx.core as mx

from hearth.worker.kv.layer_adapters import LayerMap, rounded
from hearth.worker.kv.quantise_kv import KVRows, LayerRows, LayerStates, PackedFormat

Shape = tuple[tuple[int, ...], mx.Dtype]


@dataclass(slots=True, eq=False)
class CountedCache:
    """All layers of one live cache: how many tokens it holds, and for how many there is room."""

    layers: LayerMap = field(repr=False)
    offset: int = 0
    capacity: int = 0

    def empty(self) -> bool:
        return not self.capacity

    @property
    def nbytes(self) -> int:
        layers, window = self.layers, min(self.offset, self.layers.layout.window)
        state = layers.state_bytes if self.offset else 0
        return self.capacity * layers.row_bytes + layers.window_bytes(window) + state


@cached
def hollow(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Return an array of this shape that takes no memory."""
    array = mx.broadcast_to(mx.zeros((1,) * len(shape), dtype), shape)
    mx.eval(array)
    return array


def _run(layers: list[list[Shape]]) -> KVRows:
    """Return hollow rows of layers with these shapes and types."""
    return KVRows(
        tuple(LayerRows(tuple(hollow(shape, dtype) for shape, dtype in each)) for each in layers)
    )


def _tokens(row_runs: Sequence[tuple[LayerRows, ...]]) -> int:
    return sum(run[0].arrays[0].shape[2] for run in row_runs)


class CountedLayerMap(LayerMap):
    """A LayerMap over counted caches; sizes and layout are found by the real one, in the probe."""

    def new_cache(self) -> list[Any]:
        return [CountedCache(self)]

    # ------------------------------------------------------------ rows of every token

    def rows(self, cache: list[Any], start: int, end: int) -> tuple[LayerRows, ...]:
        assert start <= end <= cache[0].offset, (start, end, cache[0].offset)
        return _run(self.row_forms(start, end)).layers

    def copy_rows(
        self, cache: list[Any], start: int, end: int, form: PackedFormat | None
    ) -> KVRows:
        assert form is None, "packed rows are not counted"
        assert 0 <= start < end, (start, end)
        return KVRows(self.rows(cache, start, end))

    def put_rows(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int, rows: int
    ) -> None:
        assert _tokens(row_runs) == position // self._rates[0], position
        cache[0].offset, cache[0].capacity = position, max(rows, position)

    def reserve(self, cache: list[Any], rows: int) -> int:
        live = cache[0]
        if live.capacity < rows:
            live.capacity = (
                self._grown(live.capacity, rows, None) if live.capacity else rounded(rows)
            )
        return int(live.capacity)

    def trim(self, cache: list[Any], position: int) -> None:
        assert cache[0].offset >= position, (cache[0].offset, position)
        cache[0].offset = position

    # ------------------------------------------------------------ windows

    def copy_window(self, cache: list[Any], tokens: int, behind: int = 0) -> KVRows:
        assert 0 <= behind < tokens <= self.window_held(cache), (behind, tokens)
        rows = tokens - behind
        return _run(
            [
                [((*shape[:2], rows, shape[3]), dtype) for shape, dtype in each]
                for each in self._window_shapes
            ]
        )

    def window_held(self, cache: list[Any]) -> int:
        return min(int(cache[0].offset), self.layout.window)

    def put_window(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int
    ) -> None:
        assert _tokens(row_runs) >= min(position, self.layout.window), position
        cache[0].offset = position

    # ------------------------------------------------------------ states

    def take_state(self, cache: list[Any]) -> LayerStates:
        """Return a state of its own: what is held twice counts twice."""
        return LayerStates(
            tuple(tuple(hollow(*part) for part in parts if part) for parts in self._states)
        )

    def put_state(self, cache: list[Any], state: LayerStates, position: int) -> None:
        assert state.nbytes == self.state_bytes, (state.nbytes, self.state_bytes)
