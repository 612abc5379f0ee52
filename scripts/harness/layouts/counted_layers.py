"""Stands in for the caches of a model of real size: all is counted, nothing is stored.

A live cache is a number of tokens. Rows, windows and states are MLX arrays of the true shapes and
types over a single zero (strides of 0), so that all that asks for their bytes is told the truth and
no memory is behind them. The same arrays serve for all runs of one length.

Which arrays a kind of layer keeps is not written here: the real LayerMap is asked for the forms of
rows, and for the windows and states of a probe. As the probe's values were never computed, it is
asked with hollow arrays in their places.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache as cached
from typing import Any, Final

import mlx.core as mx

from hearth.worker.kv.layer_adapters import LayerMap, rounded
from hearth.worker.kv.quantise_kv import KVRows, LayerRows, LayerStates, PackedFormat

Shape = tuple[tuple[int, ...], mx.Dtype]
ROWS_AXIS: Final = 2  # of every array of LayerRows


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


def _with_rows(layer: LayerRows, rows: int) -> LayerRows:
    shapes = [(*a.shape[:ROWS_AXIS], rows, *a.shape[ROWS_AXIS + 1 :]) for a in layer.arrays]
    arrays = map(hollow, shapes, [array.dtype for array in layer.arrays])
    return replace(layer, arrays=tuple(arrays))


class CountedLayerMap(LayerMap):
    """A LayerMap over counted caches; what is kept is found by the real one, in the probe."""

    def __init__(self, probe: list[Any], **how: Any) -> None:
        probe = hollowed(probe)
        super().__init__(probe, **how)
        real = LayerMap(probe, **how)
        held = real.window_held(probe) if self.layout.window else 0
        self._window = real.copy_window(probe, held) if held else KVRows(())
        state = real.take_state(probe)
        self._state = replace(state, layers=hollowed(state.layers))

    def depth(self, cache: list[Any]) -> int:
        return int(cache[0].offset)

    def nbytes(self, cache: list[Any]) -> int:
        return sum(int(each.nbytes) for each in cache)  # none of one in a batch

    # ------------------------------------------------------------ rows of every token

    def rows(self, cache: list[Any], start: int, end: int) -> tuple[LayerRows, ...]:
        assert start <= end <= cache[0].offset, (start, end, cache[0].offset)
        forms = self.row_forms(start, end)
        return tuple(LayerRows(tuple(hollow(*form) for form in layer)) for layer in forms)

    def copy_rows(
        self, cache: list[Any], start: int, end: int, form: PackedFormat | None
    ) -> KVRows:
        assert form is None, "packed rows are not counted"
        assert 0 <= start < end, (start, end)
        return KVRows(self.rows(cache, start, end))

    def put_rows(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int, rows: int
    ) -> None:
        whole = [shape[ROWS_AXIS] for layer in self.row_forms(0, position) for shape, _ in layer]
        runs = [[a.shape[ROWS_AXIS] for layer in run for a in layer.arrays] for run in row_runs]
        assert list(map(sum, zip(*runs, strict=True))) == whole, (position, whole)
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
        return KVRows(tuple(_with_rows(rows, tokens - behind) for rows in self._window.layers))

    def window_held(self, cache: list[Any]) -> int:
        return min(int(cache[0].offset), self.layout.window)

    def put_window(
        self, cache: list[Any], row_runs: Sequence[tuple[LayerRows, ...]], position: int
    ) -> None:
        held = sum(run[0].arrays[0].shape[ROWS_AXIS] for run in row_runs)
        assert held >= min(position, self.layout.window), (held, position)
        cache[0].offset = position

    # ------------------------------------------------------------ states

    def take_state(self, cache: list[Any]) -> LayerStates:
        """Return a state of its own: what is held twice counts twice."""
        return replace(self._state)

    def put_state(self, cache: list[Any], state: LayerStates, position: int) -> None:
        assert state.nbytes == self.state_bytes, (state.nbytes, self.state_bytes)
