"""What the scheduler needs: something that keeps KV, and what it is told of model and settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shared.wire import Usage
from worker.cache.block_hash import PrefixHash, Tokens
from worker.cache.index import Query
from worker.cache.planner import Plan
from worker.kv.disk import Recall
from worker.kv.slots import Slot
from worker.memory import MemoryGuard
from worker.request import Recalled, Request
from worker.watchdog import Watchdog


class Keeping(Protocol):
    """What keeps KV between requests: `Keeper`, or `NoKeeper`, which never does."""

    @property
    def apart(self) -> "Keeping": ...

    def plan(self, query: Query) -> Plan: ...

    def open(self, query: Query, rows: int) -> tuple[Slot, Plan]: ...

    def slot_cost(self, query: Query, rows: int) -> int: ...

    def releasable(self, spared: Query | None = None) -> int: ...

    def release(self, nbytes: int, spared: Query | None = None) -> None: ...

    def recall(self, query: Query, then: Callable[[Sequence[Any]], None]) -> Recall | None: ...

    def take_in(self, records: Sequence[Any], query: Query) -> int: ...

    def commit(self, slot: Slot, tokens: Tokens, name: PrefixHash) -> None: ...

    def grow(self, slot: Slot, rows: int) -> None: ...

    def lend(self, slot: Slot) -> None: ...

    def close(self, slot: Slot, cache: list[Any], tokens: Tokens, is_prefilled: bool) -> None: ...

    def pin(self, slot: Slot, pin_id: str, key: str) -> None: ...

    def unfinished(self, natural: Callable[[Tokens], list[int]]) -> Query | None: ...

    def open_spare(self, query: Query) -> Slot | None: ...

    def settle(self, query: Query) -> None: ...

    def close_spare(self, slot: Slot) -> None: ...

    def clear(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """What the scheduler is told about the model and the settings."""

    slots_max: int  # requests that compute at once
    natural_cuts: Callable[[Tokens], list[int]]  # of every prompt that begins with some tokens
    chunk: int = 1 << 40  # tokens; a forward amid an image ends at a multiple of this
    # Told of each request's end (request, reason, stop string); gives what its client is told.
    ended: Callable[[Request, Usage, str, str | None], Usage] = lambda _r, usage, _w, _s: usage
    # Has the inference thread take in what the disk's thread has read.
    post: Callable[[Recalled], None] = lambda _: None
    watchdog: Watchdog = Watchdog()
    memory: MemoryGuard = MemoryGuard()

    def forward_end(self, position: int, cut: int) -> int:
        """Return where a forward to a prompt's next `cut` ends: there, or amid a long image.

        Idle work asks here too, so that it reads a prompt in the forwards that a request takes.
        """
        return min(cut, (position // self.chunk + 1) * self.chunk)
