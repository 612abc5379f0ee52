"""Layers with K and V of every token: upstream's KVCache, its packed form, and kindred classes."""

from collections.abc import Sequence
from typing import Any, ClassVar

from hearth.worker.kv.layer_kinds.layer_kind import LayerKind, UnknownCache
from hearth.worker.kv.quantise_kv import LayerRows, put_rows, rows_of


class RowKind(LayerKind):
    """K and V of every token, in buffers with spare rows."""

    presized: ClassVar[int] = 1
    cuts: ClassVar[bool] = True

    def check(self, leaf: Any) -> None:
        if leaf.keys is None or leaf.offset == 0:
            raise UnknownCache(f"{type(leaf).__name__} that the model does not fill")

    def rows(self, leaf: Any) -> tuple[LayerRows | None, ...]:
        return (None if leaf.keys is None else rows_of(leaf),)

    def put_rows(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        if groups[0] is not None:
            put_rows(leaf, groups[0])
        leaf.offset = position

    def trim(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        assert leaf.offset >= position, (leaf.offset, position)
        leaf.offset = position

    def cut(self, leaf: Any, rows: int) -> None:
        trimmed = leaf.trim(rows)
        assert trimmed == rows or leaf.keys is None, (type(leaf).__name__, trimmed, rows)

    def back(self, leaf: Any, saved: Any, rows: int) -> None:
        self.cut(leaf, rows)


class ChosenRowKind(RowKind):
    """K and V of every token, of which attention reads the tokens that an indexer chooses."""

    chooses_tokens: ClassVar[bool] = True


class IndexedRowKind(LayerKind):
    """MiniMax M3: a KVCache within the cache, and index keys of every token beside it."""

    chooses_tokens: ClassVar[bool] = True
    merges: ClassVar[bool] = False
    cuts: ClassVar[bool] = True

    def check(self, leaf: Any) -> None:
        if leaf.empty():
            raise UnknownCache(f"{type(leaf).__name__} that the model does not fill")

    def rows(self, leaf: Any) -> tuple[LayerRows | None, ...]:
        if leaf.empty():
            return None, None
        keys = leaf.index_keys
        return rows_of(leaf.kv_cache), None if keys is None else LayerRows((keys,))

    def put_rows(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        rows, keys = groups
        if rows is not None:
            put_rows(leaf.kv_cache, rows)
        leaf.index_keys = None if keys is None else keys.arrays[0]
        leaf.offset = position

    def trim(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        leaf.offset = position  # of both buffers, whose later rows are written over

    def cut(self, leaf: Any, rows: int) -> None:
        trimmed = leaf.trim(rows)
        assert trimmed == rows, (type(leaf).__name__, trimmed, rows)

    def back(self, leaf: Any, saved: Any, rows: int) -> None:
        self.cut(leaf, rows)


class RingRowKind(RowKind):
    """K and V of a whole prompt; answers overwrite a ring behind it (Unlimited-OCR).

    The first forward of one token begins the ring, so rows that are put back are a prompt's rows.
    """

    is_prefill_only: ClassVar[bool] = True
    merges: ClassVar[bool] = False
    rewinds: ClassVar[bool] = False

    def put_rows(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        super().put_rows(leaf, groups, position)
        leaf.prefill_length, leaf._ring_pos = None, 0

    def trim(self, leaf: Any, groups: Sequence[LayerRows | None], position: int) -> None:
        super().trim(leaf, groups, position)
        leaf.prefill_length, leaf._ring_pos = None, 0


class UnfilledKind(LayerKind):
    """A cache of a class with rows that no text fills: of a layer without attention.

    `LayerMap` finds such caches in its probe. Llama 3.2 Vision's layers for images are among them:
    its images are refused.
    """

    def depth(self, leaf: Any) -> int | None:
        return None
