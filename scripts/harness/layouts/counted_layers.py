"""Stands in for the caches of a model of real size: all is counted, nothing is stored.

A live cache is a number of tokens. Rows, windows and states are MLX arrays of the true shapes and
types over a single zero (strides of 0), so that all that asks for their bytes is told the truth and
no memory is behind them. The same arrays serve for all runs of one length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from hearth.worker.kv.layer_adapters import (
    STATES,
    LayerMap,
    _of_kind,
    rounded,
)
from hearth.worker.kv.quantise_kv import (
    KVRows,
    LayerRows,
    LayerStates,
    PackedFormat,
    QuantFormat,
)

Shape = tuple[tuple[int, ...], mx.Dtype]


@dataclass(slots=True, eq=False)
class CountedCache:
    """All layers of one live cache: how many tokens it holds, and for how many there is room."""

    layers: "CountedLayerMap" = field(repr=False)
    offset: int = 0
    capacity: int = 0

    def empty(self) -> bool:
        return not self.capacity

    @property
    def nbytes(self) -> int:
        layers, window = self.layers, min(self.offset, self.layers.layout.window)
        state = layers.state_bytes if self.offset else 0
        return self.capacity * layers.row_bytes + layers.window_bytes(window) + state


def hollow(shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Return an array of this shape that takes no memory."""
    array = mx.broadcast_to(mx.zeros((1,) * len(shape), dtype), shape)
    mx.eval(array)
    return array


class CountedLayerMap(LayerMap):
    """A LayerMap over counted caches; sizes and layout are found by the real one, in the probe."""

    def __init__(self, probe: list[Any]) -> None:
        super().__init__(probe)
        states = [
            tuple(hollow(array.shape, array.dtype) for array in leaf.cache)
            for leaf in _of_kind(probe, STATES)
        ]
        self._state = LayerStates(tuple(states))
        self._kept: dict[tuple[str, int], KVRows] = {}

    def new_cache(self) -> list[Any]:
        return [CountedCache(self)]

    # ------------------------------------------------------------ rows of every token

    def rows(self, cache: list[Any], start: int, end: int) -> tuple[LayerRows, ...]:
        assert start <= end <= cache[0].offset, (start, end, cache[0].offset)
        return self._run("rows", self._shapes, end - start).layers

    def copy_rows(
        self, cache: list[Any], start: int, end: int, form: PackedFormat | None
    ) -> KVRows:
        assert form is None, "packed rows are not counted"
        assert 0 <= start < end <= cache[0].offset, (start, end, cache[0].offset)
        return self._run("rows", self._shapes, end - start)

    def put_rows(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int, rows: int
    ) -> None:
        count = sum(run[0].arrays[0].shape[2] for run in row_runs)
        assert count == position, (count, position)
        cache[0].offset, cache[0].capacity = position, max(rows, position)

    def reserve(self, cache: list[Any], rows: int) -> int:
        live = cache[0]
        if not live.capacity:
            live.capacity = rounded(rows)
        elif live.capacity < rows:
            live.capacity = self._grown(live.capacity, rows, None)
        return int(live.capacity)

    def quantise(self, cache: list[Any], form: QuantFormat) -> None:
        raise NotImplementedError("live caches of fewer bits are not counted")

    def trim(self, cache: list[Any], position: int) -> None:
        assert cache[0].offset >= position, (cache[0].offset, position)
        cache[0].offset = position

    # ------------------------------------------------------------ windows

    def copy_window(self, cache: list[Any], tokens: int, behind: int = 0) -> KVRows:
        assert 0 <= behind < tokens <= self.window_held(cache), (behind, tokens)
        return self._run("window", self._window_shapes, tokens - behind)

    def window_held(self, cache: list[Any]) -> int:
        return min(int(cache[0].offset), self.layout.window)

    def put_window(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int
    ) -> None:
        held = sum(run[0].arrays[0].shape[2] for run in row_runs)
        assert held >= min(position, self.layout.window), (held, position)
        cache[0].offset = position

    # ------------------------------------------------------------ states

    def take_state(self, cache: list[Any]) -> LayerStates:
        return LayerStates(self._state.layers)  # one of its own: what is held twice counts twice

    def put_state(self, cache: list[Any], state: LayerStates) -> None:
        assert state.nbytes == self._state.nbytes, (state.nbytes, self._state.nbytes)

    def _run(self, kind: str, shapes: list[list[Shape]], tokens: int) -> KVRows:
        """Return rows of so many tokens; layers that are alike share their arrays."""
        key = kind, tokens
        if key not in self._kept:
            made: dict[tuple[Shape, ...], LayerRows] = {}
            for layer in shapes:
                if tuple(layer) not in made:
                    made[tuple(layer)] = LayerRows(
                        tuple(hollow((*s[:2], tokens, s[3]), dtype) for s, dtype in layer)
                    )
            self._kept[key] = KVRows(tuple(made[tuple(layer)] for layer in shapes))
        return KVRows(self._kept[key].layers)
