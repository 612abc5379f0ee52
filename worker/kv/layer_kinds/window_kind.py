"""Layers that look back a number of tokens: upstream's RotatingKVCache and ChunkedKVCache."""

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from hearth.worker.kv.layer_kinds.layer_kind import LayerKind, UnknownCache
from hearth.worker.kv.quantise_kv import LayerRows


class WindowKind(LayerKind):
    """K and V of the last tokens, in a ring buffer, or in chunks of which old rows are dropped."""

    cuts: ClassVar[bool] = True

    def check(self, leaf: Any) -> None:
        name = type(leaf).__name__
        if is_ring(leaf) and leaf.keep:
            raise UnknownCache(f"{name} that keeps its first {leaf.keep} tokens")
        if leaf.keys is None or leaf.offset == 0:
            raise UnknownCache(f"{name} that the model does not fill")

    def window_size(self, leaf: Any) -> int:
        return int(leaf.max_size if is_ring(leaf) else leaf.chunk_size)

    def window_held(self, leaf: Any) -> int:
        if is_ring(leaf):
            return min(int(leaf.offset), self.window_size(leaf))
        return int(leaf.offset - leaf.start_position)

    def window(self, leaf: Any) -> LayerRows:
        return LayerRows(tuple(self._in_order(leaf, array) for array in (leaf.keys, leaf.values)))

    def put_window(self, leaf: Any, arrays: Sequence[mx.array], position: int) -> None:
        """A whole window is put: with one row fewer, MLX's next single-token step fails."""
        leaf.keys, leaf.values = arrays
        leaf.offset, count = position, arrays[0].shape[2]
        if is_ring(leaf):
            leaf._idx = count
        else:
            leaf.start_position = position - count

    def cut(self, leaf: Any, rows: int) -> None:
        if not is_ring(leaf):
            trimmed = leaf.trim(rows)
            assert trimmed == rows, (type(leaf).__name__, trimmed, rows)
            return
        # A forward of n rows leaves n - 1 rows more than the window, in order. Only these go.
        count = leaf.keys.shape[2]
        assert leaf._idx == count > rows, (leaf._idx, count, rows)
        leaf.keys = leaf.keys[..., : count - rows, :]
        leaf.values = leaf.values[..., : count - rows, :]
        leaf.offset -= rows
        leaf._idx -= rows

    def checkpoint(self, leaf: Any) -> Any:
        return (leaf.keys, leaf.values, leaf.offset, leaf._idx) if is_ring(leaf) else None

    def back(self, leaf: Any, saved: Any, rows: int) -> None:
        if saved is None:
            self.cut(leaf, rows)
        else:
            leaf.keys, leaf.values, leaf.offset, leaf._idx = saved

    def _in_order(self, leaf: Any, array: mx.array) -> mx.array:
        """Return the rows that were written, oldest first."""
        rows = array.shape[2]
        if not is_ring(leaf):
            return array[..., : self.window_held(leaf), :]
        if leaf._idx == rows:
            return array
        if leaf._idx < leaf.offset:
            return mx.concatenate([array[..., leaf._idx :, :], array[..., : leaf._idx, :]], axis=2)
        return array[..., : leaf._idx, :]


class SteppedWindowKind(WindowKind):
    """A window whose layer writes the tokens of a short forward one by one (DeepSeek V4)."""

    cuts: ClassVar[bool] = False

    def checkpoint(self, leaf: Any) -> Any:
        # Copied, because single tokens are written in place.
        return mx.array(leaf.keys), mx.array(leaf.values), leaf.offset, leaf._idx


def is_ring(leaf: Any) -> bool:
    """Whether a window layer is a ring buffer. Chunked layers (Llama 4) drop old rows instead."""
    return hasattr(leaf, "max_size")
