"""Layers with one row for several tokens: PoolingCache (DeepSeek V4, GLM-5.3-Flash)."""

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from hearth.worker.kv.layer_kinds.layer_kind import LayerKind, StateArrays
from hearth.worker.kv.quantise_kv import LayerRows

# The tokens of the row that is not yet whole, and the last whole block, which the next row of an
# overlapping compression reads too (worker/engine/cut_repairs.py).
PENDING = ("buf_kv", "buf_gate", "previous_kv", "previous_gate")


class PooledKind(LayerKind):
    """Pooled rows, one for every `ratio` tokens, and the pending tokens of the next row."""

    chooses_tokens: ClassVar[bool] = True

    def probe_tokens(self, leaf: Any) -> int:
        return int(leaf.ratio)

    def depth(self, leaf: Any) -> int | None:
        return None  # `offset` counts pooled rows

    def rows(self, leaf: Any) -> tuple[LayerRows | None, ...]:
        return (None if leaf.pooled is None else LayerRows((leaf.pooled[:, None],)),)

    def rates(self, leaf: Any) -> tuple[int, ...]:
        return (int(leaf.ratio),)

    def put_rows(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        group = groups[0]
        leaf.pooled = None
        if group is not None and group.arrays[0].shape[2]:
            leaf.pooled = mx.contiguous(group.arrays[0][:, 0])

    def state(self, leaf: Any) -> StateArrays:
        return tuple(getattr(leaf, name, None) for name in PENDING)

    def put_state(self, leaf: Any, arrays: StateArrays, position: int) -> None:
        leaf.remainder = position % leaf.ratio
        for name, array in zip(PENDING, arrays, strict=True):
            # Copied, because upstream writes to the buffers in place.
            setattr(leaf, name, None if array is None else mx.array(array))

    def checkpoint(self, leaf: Any) -> Any:
        pending = tuple(None if part is None else mx.array(part) for part in self.state(leaf))
        return leaf.pooled, pending, leaf.remainder

    def back(self, leaf: Any, saved: Any, rows: int) -> None:
        leaf.pooled, pending, remainder = saved
        self.put_state(leaf, pending, remainder)  # of a position only its remainder counts
