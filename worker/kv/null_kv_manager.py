"""Gives each request an empty slot and keeps nothing of it.

So run requests with `use_kv_cache: false`, and models whose caches can't be reused.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hearth.shared.errors import RequestError
from hearth.worker.cache.block_hash import PrefixHash, Tokens
from hearth.worker.cache.extent_store import Joint
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.cache.resume_planner import ResumePlan
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.live_slot import LiveSlot
from hearth.worker.kv.memory_release import EncodedImages, Reason

_NO_PLAN = ResumePlan.cold()
_RAW = KeepRules(slots_max=1, chunk=1, is_exact=True)  # no rows are packed


class NullKVManager:
    """The KV manager that keeps nothing: each request runs in an empty slot of its own.

    With `layers` and `rules` requests compute what they would in `KVManager` from an empty cache:
    slots grow and are packed alike. Without, nobody knows what a slot takes. Also what tests
    compare a warm cache with. Owner: the inference thread.
    """

    def __init__(
        self,
        new_cache: Callable[[], list[Any]],
        layers: LayerMap | None = None,
        rules: KeepRules = _RAW,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._images = EncodedImages()
        self._new_cache = new_cache
        self._layers = layers
        self._rules = rules

    @property
    def uncached(self) -> "NullKVManager":
        """The KV manager of requests that are not to be kept."""
        return self

    def plan(self, query: PrefixQuery) -> ResumePlan:
        return _NO_PLAN

    def open(self, query: PrefixQuery, rows: int) -> tuple[LiveSlot, ResumePlan]:
        self.counts["match_miss"] += 1
        joint = Joint(PrefixHash(b""), 0)
        slot = LiveSlot(0, self._new_cache(), joint)
        self._quantise(slot, 0)
        self._reserve(slot, rows)
        return slot, _NO_PLAN

    def slot_cost(self, query: PrefixQuery, rows: int) -> int:
        return self.cold_bytes(rows)

    def copied_bytes(self, query: PrefixQuery) -> int:
        return 0

    def cold_bytes(self, rows: int) -> int:
        """Return what an empty slot for `rows` tokens takes."""
        if self._layers is None:
            return 0
        return self._layers.slot_bytes(rows, self._rules.format_at(rows))

    def unwritten_bytes(self, rows: int) -> int:
        """Return what of that the first forward allocates: windows and states."""
        return 0 if self._layers is None else self._layers.unwritten_bytes(rows)

    def releasable(self, query: PrefixQuery | None = None) -> int:
        return self._images.nbytes()

    def release(
        self,
        nbytes: int,
        query: PrefixQuery | None = None,
        reason: Reason = Reason.MEMORY,
    ) -> None:
        if self._images.nbytes():  # a request that waits for memory asks at every step
            self._images.release()

    def recall(self, query: PrefixQuery, then: Callable[[Any], None]) -> None:
        return None

    def take_in(self, records: Sequence[Any], query: PrefixQuery) -> int:
        return 0

    def commit(
        self, slot: LiveSlot, tokens: Tokens, name: PrefixHash, *, is_fast: bool = False
    ) -> None:
        slot.tokens = tokens
        self._quantise(slot, len(tokens))

    def grow(self, slot: LiveSlot, rows: int) -> None:
        is_packed_now = self._quantise(slot, rows)
        if is_packed_now or rows > slot.capacity:
            self._reserve(slot, rows)

    def grow_for_draft(self, slot: LiveSlot, rows: int, draft_rows: int) -> int:
        self.grow(slot, rows)
        later = self._rules.format_at(rows + draft_rows)
        if later is not None and slot.format is None:
            return 0  # rows are packed from amid the draft on
        self.grow(slot, rows + draft_rows)
        return draft_rows

    def limit_growth(self, has_room: Callable[[int], bool]) -> None:
        pass

    def release_too(self, images: EncodedImages) -> None:
        self._images = images

    def lend(self, slot: LiveSlot) -> None:
        slot.cache, slot.capacity = [], 0

    def take_back(self, slot: LiveSlot, cache: list[Any]) -> None:
        slot.cache = cache

    def lend_bytes(self, slot: LiveSlot) -> int:
        return 0

    def close(self, slot: LiveSlot, cache: list[Any], tokens: Tokens, is_prefilled: bool) -> None:
        pass

    def pin(self, slot: LiveSlot, pin_id: str, key: str) -> None:
        """Raises: RequestError: always."""
        raise RequestError(
            "Nothing can be pinned: this model's KV is not kept. Prompts are read anew each time.",
            code="not_kept",
        )

    def unpin(self, pin_id: str, key: str) -> bool:
        return False

    def hand_over(self) -> None:
        pass

    def shut(self, flush_s: float) -> None:
        pass

    def sweep(self) -> bool:
        return False

    def clear(self) -> None:
        pass

    @property
    def slots(self) -> Sequence[LiveSlot]:
        return []

    def _reserve(self, slot: LiveSlot, rows: int) -> None:
        if self._layers is not None:
            slot.capacity = self._layers.reserve(slot.cache, rows)
            assert slot.capacity >= rows, (slot.capacity, rows)

    def _quantise(self, slot: LiveSlot, position: int) -> bool:
        """Pack the slot's rows once there are enough; say whether they were packed now."""
        form = self._rules.format_at(position)
        if form is None or slot.format is not None or self._layers is None:
            return False
        self._layers.quantise(slot.cache, form)
        slot.format = form
        return True
