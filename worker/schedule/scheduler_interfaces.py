"""What the scheduler needs: something that keeps KV, and what it is told of model and settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hearth.shared.wire_messages import Usage
from hearth.worker.cache.block_hash import PrefixHash, Tokens
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.cache.resume_planner import ResumePlan
from hearth.worker.kv.disk_tier import DiskRecall
from hearth.worker.kv.live_slots import LiveSlot
from hearth.worker.schedule.generation_watchdog import GenerationWatchdog
from hearth.worker.schedule.memory_guard import MemoryGuard
from hearth.worker.schedule.request_state import RecallDone, Request


class KVManagerInterface(Protocol):
    """What keeps KV between requests: `Keeper`, or `NoKeeper`, which never does."""

    @property
    def apart(self) -> "KVManagerInterface": ...

    def plan(self, query: PrefixQuery) -> ResumePlan: ...

    def open(self, query: PrefixQuery, rows: int) -> tuple[LiveSlot, ResumePlan]: ...

    def slot_cost(self, query: PrefixQuery, rows: int) -> int: ...

    def releasable(self, spared: PrefixQuery | None = None) -> int: ...

    def release(self, nbytes: int, spared: PrefixQuery | None = None) -> None: ...

    def recall(
        self, query: PrefixQuery, then: Callable[[Sequence[Any]], None]
    ) -> DiskRecall | None: ...

    def take_in(self, records: Sequence[Any], query: PrefixQuery) -> int: ...

    def commit(self, slot: LiveSlot, tokens: Tokens, name: PrefixHash) -> None: ...

    def grow(self, slot: LiveSlot, rows: int) -> None: ...

    def lend(self, slot: LiveSlot) -> None: ...

    def close(
        self, slot: LiveSlot, cache: list[Any], tokens: Tokens, is_prefilled: bool
    ) -> None: ...

    def pin(self, slot: LiveSlot, pin_id: str, key: str) -> None: ...

    def unfinished(self, natural: Callable[[Tokens], list[int]]) -> PrefixQuery | None: ...

    def open_spare(self, query: PrefixQuery) -> LiveSlot | None: ...

    def settle(self, query: PrefixQuery) -> None: ...

    def close_spare(self, slot: LiveSlot) -> None: ...

    def clear(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SchedulerRules:
    """What the scheduler is told about the model and the settings."""

    slots_max: int  # requests that compute at once
    natural_cuts: Callable[[Tokens], list[int]]  # of every prompt that begins with some tokens
    chunk: int = 1 << 40  # tokens; a forward amid an image ends at a multiple of this
    # Told of each request's end (request, reason, stop string); gives what its client is told.
    ended: Callable[[Request, Usage, str, str | None], Usage] = lambda _r, usage, _w, _s: usage
    # Has the inference thread take in what the disk's thread has read.
    post: Callable[[RecallDone], None] = lambda _: None
    watchdog: GenerationWatchdog = GenerationWatchdog()
    memory: MemoryGuard = MemoryGuard()

    def forward_end(self, position: int, cut: int) -> int:
        """Return where a forward to a prompt's next `cut` ends: there, or amid a long image.

        Idle work asks here too, so that it reads a prompt in the forwards that a request takes.
        """
        return min(cut, (position // self.chunk + 1) * self.chunk)
