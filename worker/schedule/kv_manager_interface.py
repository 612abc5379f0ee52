"""Declares the methods by which the scheduler uses a KV manager."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hearth.worker.cache.block_hash import PrefixHash, Tokens
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.cache.resume_planner import ResumePlan
from hearth.worker.kv.disk_tier import DiskRecall
from hearth.worker.kv.kv_transfer import IdleMode
from hearth.worker.kv.live_slot import LiveSlot
from hearth.worker.kv.null_kv_manager import NullKVManager


class KVManagerInterface(Protocol):
    """Hands out live slots and keeps KV between requests.

    `KVManager` keeps it; `NullKVManager` and `UncachedKVManager` never do. Owner: the inference
    thread; no method may be called from elsewhere, and none blocks.
    """

    @property
    def uncached(self) -> NullKVManager: ...

    @property
    def idle_mode(self) -> IdleMode: ...

    def plan(self, query: PrefixQuery) -> ResumePlan: ...

    def open(self, query: PrefixQuery, rows: int) -> tuple[LiveSlot, ResumePlan]: ...

    def slot_cost(self, query: PrefixQuery, rows: int) -> int: ...

    def copied_bytes(self, query: PrefixQuery) -> int: ...

    def releasable(self, spared: PrefixQuery | None = None) -> int: ...

    def release(self, nbytes: int, spared: PrefixQuery | None = None) -> None: ...

    def recall(
        self, query: PrefixQuery, then: Callable[[Sequence[Any]], None]
    ) -> DiskRecall | None: ...

    def take_in(self, records: Sequence[Any], query: PrefixQuery) -> int: ...

    def commit(
        self, slot: LiveSlot, tokens: Tokens, name: PrefixHash, *, is_fast: bool = False
    ) -> None: ...

    def grow(self, slot: LiveSlot, rows: int) -> None: ...

    def lend(self, slot: LiveSlot) -> None: ...

    def close(
        self, slot: LiveSlot, cache: list[Any], tokens: Tokens, is_prefilled: bool
    ) -> None: ...

    def pin(self, slot: LiveSlot, pin_id: str, key: str) -> None: ...

    def unfinished(self, natural: Callable[[Tokens], list[int]]) -> PrefixQuery | None: ...

    def open_spare(
        self, query: PrefixQuery, is_foreseen: bool, has_room: Callable[[int], bool]
    ) -> LiveSlot | None: ...

    def known_to(self, query: PrefixQuery) -> int: ...

    def settle(self, query: PrefixQuery) -> None: ...

    def close_spare(self, slot: LiveSlot) -> None: ...

    def clear(self) -> None: ...
