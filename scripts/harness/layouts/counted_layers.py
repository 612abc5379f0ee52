"""Stands in for the caches of a model of real size: all is counted, nothing is stored.

A live cache is a number of tokens. Rows, windows and states are MLX arrays of the true shapes and
types over a single zero (strides of 0), so that all that asks for their bytes is told the truth and
no memory is behind them. The same arrays serve for all runs of one length.

Which arrays a kind of layer keeps, and how many tokens one row of each stands for, is not written
here: the real LayerMap is asked for two lengths of a probe, and their difference tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache as cached
from typing import Any

import mlx.core as mx

from hearth.worker.kv.layer_adapters import LayerMap, rounded
from hearth.worker.kv.quantise_kv import KVRows, LayerRows, LayerStates, PackedFormat


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


def hollowed(value: Any) -> Any:
    """Return `value`, a cache or a part of one, with hollow arrays in place of its arrays."""
    if isinstance(value, mx.array):
        return hollow(value.shape, value.dtype)
    if isinstance(value, list | tuple):
        return type(value)(map(hollowed, value))
    if hasattr(value, "__dict__"):
        vars(value).update({name: hollowed(part) for name, part in vars(value).items()})
    return value


@dataclass(frozen=True, slots=True)
class KeptArray:
    """One array that a layer keeps: its rows are on `axis`, one for every `rate` tokens."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    axis: int
    rate: int

    @classmethod
    def seen(cls, fewer: mx.array, more: mx.array, tokens: int) -> "KeptArray":
        """Return what two lengths tell, of which the second has `tokens` more."""
        grown = [axis for axis, n in enumerate(more.shape) if n != fewer.shape[axis]]
        assert len(grown) == 1, f"the probe is too short to see rows: {fewer.shape}, {more.shape}"
        rows = more.shape[grown[0]] - fewer.shape[grown[0]]
        assert tokens % rows == 0, (tokens, rows)
        return cls(more.shape, more.dtype, grown[0], tokens // rows)

    def of(self, start: int, end: int) -> mx.array:
        """Return the rows that the tokens [start, end) complete."""
        rows = end // self.rate - start // self.rate
        return hollow((*self.shape[: self.axis], rows, *self.shape[self.axis + 1 :]), self.dtype)


class KeptLayers:
    """What layers of one kind keep of a run of tokens."""

    def __init__(self, fewer: Sequence[LayerRows], more: Sequence[LayerRows], tokens: int) -> None:
        self._layers = list(more)
        self._arrays = [
            [KeptArray.seen(*pair, tokens) for pair in zip(old.arrays, new.arrays, strict=True)]
            for old, new in zip(fewer, more, strict=True)
        ]

    def of(self, start: int, end: int) -> tuple[LayerRows, ...]:
        """Return the rows of the tokens [start, end)."""
        return tuple(
            replace(layer, arrays=tuple(array.of(start, end) for array in arrays))
            for layer, arrays in zip(self._layers, self._arrays, strict=True)
        )

    def tokens(self, row_runs: Sequence[tuple[LayerRows, ...]]) -> int:
        """Return how many tokens `row_runs` are of, by the first array."""
        first = self._arrays[0][0]
        return first.rate * sum(run[0].arrays[0].shape[first.axis] for run in row_runs)

    def check(self, row_runs: Sequence[tuple[LayerRows, ...]], position: int) -> None:
        """Check that `row_runs` together are the rows of the first `position` tokens."""
        for number, arrays in enumerate(self._arrays):
            for index, array in enumerate(arrays):
                rows = sum(run[number].arrays[index].shape[array.axis] for run in row_runs)
                assert rows == position // array.rate, (number, rows, array, position)


class CountedLayerMap(LayerMap):
    """A LayerMap over counted caches; what is kept is found by the real one, in the probe."""

    def __init__(self, probe: list[Any]) -> None:
        probe = hollowed(probe)
        super().__init__(probe)
        real = LayerMap(probe)
        depth = real.depth(probe) or 0
        half = depth // 2
        self._kept = KeptLayers(
            real.rows(probe, 0, half) if self.layout.has_rows else (),
            real.rows(probe, 0, depth) if self.layout.has_rows else (),
            depth - half,
        )
        held = real.window_held(probe) if self.layout.window else 0
        self._windows = KeptLayers(
            real.copy_window(probe, held, held - 1).layers if held else (),
            real.copy_window(probe, held).layers if held else (),
            held - 1,
        )
        state = real.take_state(probe)
        self._state = replace(state, layers=hollowed(state.layers))

    def depth(self, cache: list[Any]) -> int:
        return int(cache[0].offset)

    def nbytes(self, cache: list[Any]) -> int:
        return int(cache[0].nbytes)

    # ------------------------------------------------------------ rows of every token

    def rows(self, cache: list[Any], start: int, end: int) -> tuple[LayerRows, ...]:
        assert start <= end <= cache[0].offset, (start, end, cache[0].offset)
        return self._kept.of(start, end)

    def copy_rows(
        self, cache: list[Any], start: int, end: int, form: PackedFormat | None
    ) -> KVRows:
        assert form is None, "packed rows are not counted"
        assert 0 <= start < end, (start, end)
        return KVRows(self.rows(cache, start, end))

    def put_rows(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int, rows: int
    ) -> None:
        self._kept.check(row_runs, position)
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
        return KVRows(self._windows.of(0, tokens - behind))

    def window_held(self, cache: list[Any]) -> int:
        return min(int(cache[0].offset), self.layout.window)

    def put_window(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int
    ) -> None:
        held = self._windows.tokens(row_runs)
        assert held >= min(position, self.layout.window), (held, position)
        cache[0].offset = position

    # ------------------------------------------------------------ states

    def take_state(self, cache: list[Any]) -> LayerStates:
        """Return a state of its own: what is held twice counts twice."""
        return replace(self._state)

    def put_state(self, cache: list[Any], state: LayerStates) -> None:
        assert state.nbytes == self.state_bytes, (state.nbytes, self.state_bytes)
