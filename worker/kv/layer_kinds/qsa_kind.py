"""Layers that choose blocks of tokens: QSAKVCache of Qwen3.8-Flash-Next (`qwen4_exp`)."""

from collections.abc import Sequence
from typing import Any, ClassVar

from hearth.worker.kv.layer_kinds.row_kinds import ChosenRowKind
from hearth.worker.kv.quantise_kv import LayerRows


class QSAKind(ChosenRowKind):
    """K and V, index keys and their positions, all of every token.

    `index_block_keys`, one for each block of tokens, are derived from the index keys.
    Upstream's batches of these caches give other logits than each row alone.
    """

    merges: ClassVar[bool] = False

    def rows(self, leaf: Any) -> tuple[LayerRows | None, ...]:
        keys, positions = leaf.index_keys, leaf.index_position_ids
        if keys is None:
            return (*super().rows(leaf), None, None)
        # (1, tokens, width), and (1, tokens) or (axes, 1, tokens)
        ids = positions.reshape(1, -1, positions.shape[-1], 1)
        return (*super().rows(leaf), LayerRows((keys[:, None],)), LayerRows((ids,)))

    def put_rows(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        super().put_rows(leaf, groups, position)
        keys, ids = groups[1], groups[2]
        assert keys is not None and ids is not None
        self._put_index(leaf, keys, ids)

    def trim(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        super().trim(leaf, groups, position)
        keys, ids = groups[1], groups[2]
        assert keys is not None and ids is not None
        self._put_index(leaf, keys, ids)

    def _put_index(self, leaf: Any, keys: LayerRows, ids: LayerRows) -> None:
        leaf.index_keys = keys.arrays[0][:, 0]
        rows = ids.arrays[0][0, ..., 0]  # (axes, tokens)
        leaf.index_position_ids = rows if rows.shape[0] == 1 else rows[:, None]
        leaf.clear_index_blocks()
