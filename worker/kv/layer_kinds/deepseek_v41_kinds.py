"""The caches of DeepSeek V4.1: mlx-lm's LayerCache, and mlx-vlm's DeepseekV41Cache of all layers.

The window is part of the state, as both libraries keep it apart from KVCache's form.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from hearth.worker.kv.layer_kinds.layer_kind import LayerKind, StateArrays
from hearth.worker.kv.quantise_kv import LayerRows

PROBE_TOKENS = 257  # at least two rows of each compression ratio, and more than a window


class _CompressedKind(LayerKind):
    chooses_tokens: ClassVar[bool] = True
    merges: ClassVar[bool] = False
    rewinds: ClassVar[bool] = False
    ragged: ClassVar[bool] = True

    def probe_tokens(self, leaf: Any) -> int:
        return PROBE_TOKENS

    def rates(self, leaf: Any) -> tuple[int, ...]:
        counts = [1 if rows is None else rows.arrays[0].shape[2] for rows in self.rows(leaf)]
        return tuple(max(1, int(leaf.offset) // count) for count in counts)


class LayerCacheKind(_CompressedKind):
    """mlx-lm: compressed rows, index keys, the window, and the pending tokens of one layer."""

    def rows(self, leaf: Any) -> tuple[LayerRows | None, ...]:
        return _rows(leaf.compress_kv), _rows(leaf.index_k)

    def put_rows(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        leaf.compress_kv, leaf.index_k = map(_array, groups)
        leaf.offset = position

    def state(self, leaf: Any) -> StateArrays:
        return leaf.window, leaf.pending_kv, leaf.pending_gate

    def put_state(self, leaf: Any, arrays: StateArrays, position: int) -> None:
        leaf.window, leaf.pending_kv, leaf.pending_gate = arrays


class DeepseekV41Kind(_CompressedKind):
    """mlx-vlm: compressed rows and index keys of all layers, the ids of engrams, and the rest."""

    def nbytes(self, leaf: Any) -> int:
        grown = (*leaf._compress_buffers, *leaf._key_buffers, leaf.engram)  # with spare rows
        return sum(array.nbytes for array in (*grown, *self.state(leaf)) if array is not None)

    def rows(self, leaf: Any) -> tuple[LayerRows | None, ...]:
        ids = None if leaf.engram is None else LayerRows((leaf.engram[:, None, :, None],))
        return (*map(_rows, leaf.compress), *map(_rows, leaf.keys), ids)

    def put_rows(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        arrays, ids = list(map(_array, groups[:-1])), groups[-1]
        leaf.compress, leaf.keys = arrays[: leaf.n_layers], arrays[leaf.n_layers :]
        leaf._compress_buffers, leaf._key_buffers = list(leaf.compress), list(leaf.keys)
        leaf.engram = None if ids is None else ids.arrays[0][:, 0, :, 0]
        leaf.offset = position
        leaf.reset_handoff()

    def state(self, leaf: Any) -> StateArrays:
        return (*leaf.window, *leaf.kv_state, *leaf.score_state)

    def put_state(self, leaf: Any, arrays: StateArrays, position: int) -> None:
        # Copied, because upstream writes to the windows in place.
        copies = [None if array is None else mx.array(array) for array in arrays]
        count = leaf.n_layers
        leaf.window, leaf.kv_state = copies[:count], copies[count : 2 * count]
        leaf.score_state = copies[2 * count :]


def _rows(array: mx.array | None) -> LayerRows | None:
    """Return an array (1, rows, width) as a row group."""
    return None if array is None or not array.shape[1] else LayerRows((array[:, None],))


def _array(group: LayerRows | None) -> mx.array | None:
    """Return a row group as an array (1, rows, width) of its own; None for no rows."""
    if group is None or not group.arrays[0].shape[2]:
        return None
    return mx.contiguous(group.arrays[0][:, 0])
