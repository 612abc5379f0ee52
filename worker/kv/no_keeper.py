"""A keeper that never keeps: for models whose caches cannot be taken apart, and for comparing."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from shared.errors import RequestError
from worker.cache.block_hash import PrefixHash, Tokens
from worker.cache.extents import Joint
from worker.cache.index import Query
from worker.cache.planner import Plan
from worker.kv.slots import Slot

_NO_PLAN = Plan.cold()


class NoKeeper:
    """Gives every request an empty slot and forgets it. Owner: the inference thread."""

    def __init__(self, new_cache: Callable[[], list[Any]]) -> None:
        self.counts: Counter[str] = Counter()
        self._new_cache = new_cache

    @property
    def apart(self) -> "NoKeeper":
        """What a request runs in that is not to be kept."""
        return self

    def plan(self, query: Query) -> Plan:
        return _NO_PLAN

    def open(self, query: Query, rows: int) -> tuple[Slot, Plan]:
        self.counts["match_miss"] += 1
        return Slot(0, self._new_cache(), Joint(PrefixHash(b""), 0)), _NO_PLAN

    def slot_cost(self, query: Query, rows: int) -> int:
        return 0  # nobody knows what such a model's caches take

    def releasable(self, spared: Query | None = None) -> int:
        return 0

    def release(self, nbytes: int, spared: Query | None = None) -> None:
        pass

    def recall(self, query: Query, then: Callable[[Any], None]) -> None:
        return None

    def take_in(self, records: Sequence[Any], query: Query) -> int:
        return 0

    def commit(self, slot: Slot, tokens: Tokens, name: PrefixHash) -> None:
        slot.tokens = tokens

    def grow(self, slot: Slot, rows: int) -> None:
        pass

    def lend(self, slot: Slot) -> None:
        pass

    def close(self, slot: Slot, cache: list[Any], tokens: Tokens, is_prefilled: bool) -> None:
        pass

    def pin(self, slot: Slot, pin_id: str, key: str) -> None:
        """Raises: RequestError: always."""
        raise RequestError(
            "Nothing can be pinned: this model's KV is not kept. Prompts are read anew each time.",
            code="not_kept",
        )

    def unpin(self, pin_id: str, key: str) -> bool:
        return False

    def unfinished(self, natural: Callable[[Tokens], list[int]]) -> Query | None:
        return None

    def open_spare(self, query: Query) -> Slot | None:
        return None

    def settle(self, query: Query) -> None:
        pass

    def close_spare(self, slot: Slot) -> None:
        pass

    def hand_over(self) -> None:
        pass

    def shut(self, flush_s: float) -> None:
        pass

    def sweep(self) -> bool:
        return False

    def clear(self) -> None:
        pass

    @property
    def slots(self) -> Sequence[Slot]:
        return []
