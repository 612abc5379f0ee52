"""Runs requests with `use_kv_cache: false`, which neither find KV in the cache nor leave any."""

from collections.abc import Callable
from typing import Any

from hearth.worker.cache.block_hash import PrefixHash, Tokens
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.cache.resume_planner import ResumePlan
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.live_slot import LiveSlot
from hearth.worker.kv.null_kv_manager import NullKVManager


class UncachedKVManager(NullKVManager):
    """The KV manager of requests that do not use the cache.

    They compute what `KVManager` would from an empty cache: slots grow and are packed alike.
    Owner: the inference thread.
    """

    def __init__(
        self, layers: LayerMap, new_cache: Callable[[], list[Any]], rules: KeepRules
    ) -> None:
        super().__init__(new_cache)
        self._layers = layers
        self._rules = rules

    def slot_cost(self, query: PrefixQuery, rows: int) -> int:
        return self.cold_bytes(rows)

    def cold_bytes(self, rows: int) -> int:
        return self._layers.slot_bytes(rows, self._rules.format_at(rows))

    def unwritten_bytes(self, rows: int) -> int:
        return self._layers.unwritten_bytes(rows)

    def open(self, query: PrefixQuery, rows: int) -> tuple[LiveSlot, ResumePlan]:
        slot, plan = super().open(query, rows)
        self._quantise(slot, 0)
        slot.capacity = self._layers.reserve(slot.cache, rows)
        assert slot.position == 0 and slot.capacity >= rows, (slot.position, slot.capacity, rows)
        return slot, plan

    def commit(
        self, slot: LiveSlot, tokens: Tokens, name: PrefixHash, *, is_fast: bool = False
    ) -> None:
        super().commit(slot, tokens, name)
        self._quantise(slot, len(tokens))

    def grow(self, slot: LiveSlot, rows: int) -> None:
        is_packed_now = self._quantise(slot, rows)
        if is_packed_now or rows > slot.capacity:
            slot.capacity = self._layers.reserve(slot.cache, rows)

    def grow_for_draft(self, slot: LiveSlot, rows: int, draft_rows: int) -> int:
        self.grow(slot, rows)
        later = self._rules.format_at(rows + draft_rows)
        if later is not None and slot.format is None:
            return 0  # rows are packed from amid the draft on
        self.grow(slot, rows + draft_rows)
        return draft_rows

    def lend(self, slot: LiveSlot) -> None:
        slot.cache, slot.capacity = [], 0

    def take_back(self, slot: LiveSlot, cache: list[Any]) -> None:
        slot.cache = cache

    def _quantise(self, slot: LiveSlot, position: int) -> bool:
        """Pack the slot's rows once there are enough; say whether they were packed now."""
        form = self._rules.format_at(position)
        if form is None or slot.format is not None:
            return False
        self._layers.quantise(slot.cache, form)
        slot.format = form
        return True
