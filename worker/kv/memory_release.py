"""Frees memory of kept KV, of encoded images and of idle live slots: the one way out of it.

Who asks says how many bytes and for what reason; the reason says what may go. What goes first is
one ranking for all (`Evictor.free`), which docs/cache.md has on a page.
"""

import ctypes
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import mlx.core as mx

from hearth.worker.cache.eviction import LIVE, NEEDLESS, SLACK, Candidate, Evictor, Freed, Rank
from hearth.worker.cache.extent_store import Extent, within_window
from hearth.worker.cache.pinned_prompts import Pin
from hearth.worker.cache.prefix_search import ResumePlan
from hearth.worker.kv.kv_transfer import LiveSlot

_LIBC: Final = ctypes.CDLL(None)


class Reason(Enum):
    """Why memory is freed, beside room for what is to be kept (`Evictor.make_room`)."""

    MEMORY = "memory"  # a prompt or an answer has to fit, or the system is out of memory
    WARNING = "warning"  # the system begins to run short: live slots stay
    SLOTS = "slots"  # slots are too many or too old; what they hold is kept where there is room
    AGE = "age"  # nothing has used it for the time to live


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """What is kept of encoded images; who needs one again has it encoded again.

    All those that no prompt is amid go at once.
    """

    nbytes: Callable[[], int] = lambda: 0  # that may go now
    release: Callable[[], object] = lambda: None
    extent: None = None
    kind: str = "images"

    def is_held(self) -> bool:
        return self.nbytes() > 0

    def rank(self, evictor: Evictor, now: float) -> Rank:
        return NEEDLESS, 1.0

    def evict(self, evictor: Evictor) -> Freed:
        nbytes = self.nbytes()
        self.release()
        return Freed(nbytes)


@dataclass(frozen=True, slots=True)
class Spared:
    """What a prompt goes on from, which does not go for it."""

    pin: Pin = Pin("", (), (), ())
    slot: int | None = None

    @classmethod
    def of(cls, plan: ResumePlan, window: int) -> "Spared":
        """Return what a plan needs: of states the last, of windows those that it looks back to."""
        path = plan.path
        looked_at = within_window(path[-1].end, window) if path else ()
        near = tuple(extent for extent in looked_at if extent.window is not None)
        last = tuple(e.end for e in path[-1:] if e.end.snapshot is not None)
        return cls(Pin("", path, near, last), plan.slot)


NOTHING = Spared()


class MemoryRelease:
    """Frees memory. Owner: the inference thread.

    Invariant: nothing goes that is pinned or spared, nor what a running request stands on; what
    only a slot has of a spared path is copied out before the slot goes.
    """

    def __init__(
        self,
        evictor: Evictor,
        slots: dict[int, LiveSlot],
        slot_bytes: Callable[[LiveSlot], int],
        give_up: Callable[[LiveSlot, Collection[Extent] | None], None],
    ) -> None:
        """`give_up` empties a slot, and keeps what only it holds: of some runs, None = of all."""
        self.evictor = evictor
        self.slot_bytes = slot_bytes
        self.give_up = give_up
        self.images = EncodedImages()
        self.slots = slots

    def idle(self, spared: Spared = NOTHING) -> list[LiveSlot]:
        """Return the slots that no request uses, but for the spared one: the least needed first."""
        idle = (s for s in self.slots.values() if not s.is_busy and s.number != spared.slot)
        return sorted(idle, key=_need)

    def free(
        self,
        reason: Reason,
        nbytes: float = math.inf,
        *,
        spared: Spared = NOTHING,
        slots: Sequence[LiveSlot] | None = None,
        expired: Collection[Extent] = (),
    ) -> int:
        """Free `nbytes` or, for want of those, all that may go for this reason; return how many.

        Of the idle slots only `slots` go, None = any. For its age only what is `expired` goes.
        """
        evictor, budget = self.evictor, self.evictor.store.budget
        needs_memory = reason in (Reason.MEMORY, Reason.WARNING)
        slack = max(0.0, budget.bytes_used - nbytes) * SLACK if needs_memory else 0.0
        if slots is None:
            slots = self.idle(spared) if reason is not Reason.WARNING else []
        candidates: list[Candidate] = [
            _Slot(self, slot, reason, spared.pin.path, expired) for slot in slots
        ]

        def is_enough(freed: int, following: Rank) -> bool:
            """Kept KV gives a little more, so that not all is ranked anew for each need."""
            return freed >= nbytes + (slack if following < (LIVE,) else 0)

        numbers = {slot.number for slot in slots}
        spared.pin.mark(1)
        try:
            if needs_memory:
                candidates += [*evictor.kept_parts(), self.images]
            elif reason is Reason.AGE:  # what a slot has that goes too goes with it
                candidates += evictor.expired(e for e in expired if e.holders.isdisjoint(numbers))
            freed = evictor.free(
                candidates,
                is_enough,
                time.monotonic(),
                among=expired if reason is Reason.AGE else None,
            )
        finally:
            spared.pin.mark(-1)
        if reason is not Reason.SLOTS:
            mx.clear_cache()
        return freed


def _need(slot: LiveSlot) -> tuple[bool, bool, float]:
    """Rank a slot by last use: a copy brings it back, so that it matters who comes next.

    That is an agent amid its turns, not the one that waits for it, however much likelier the latter
    comes at all. A title or a topic check comes once.
    """
    return (not slot.is_spare, not slot.line.is_side, slot.used_at)


@dataclass(frozen=True, slots=True)
class _Slot:
    """An idle live cache, with the rows that only it has."""

    memory: MemoryRelease
    slot: LiveSlot
    reason: Reason
    path: Sequence[Extent]  # that is spared
    expired: Collection[Extent]

    @property
    def kind(self) -> str:
        return "expired" if self.reason is Reason.AGE else "slot"

    @property
    def extent(self) -> Extent | None:
        return self.slot.node.arrival if self.reason is not Reason.SLOTS else None

    def is_held(self) -> bool:
        is_own = self.memory.slots.get(self.slot.number) is self.slot
        return is_own and not self.slot.is_busy

    def rank(self, evictor: Evictor, now: float) -> Rank:
        return (LIVE, *_need(self.slot))

    def evict(self, evictor: Evictor) -> Freed:
        memory, slot, store = self.memory, self.slot, evictor.store
        live, count = memory.slot_bytes(slot), len(store)
        held = live + store.budget.bytes_used
        for extent in self.expired:
            if extent.holders == {slot.number}:
                store.remove(extent)
        memory.give_up(slot, self.path if self.reason is Reason.MEMORY else None)
        if self.reason is Reason.SLOTS:
            return Freed(live, is_loss=False)
        freed = max(0, held - store.budget.bytes_used)
        if self.reason is Reason.AGE:
            return Freed(freed, parts=count - len(store))
        return Freed(freed, exposed=evictor.kept_parts())  # what stood on its rows, and may go now


def release_memory() -> None:
    """Return to the system the memory that MLX and malloc keep for later. Takes milliseconds.

    On a CPU MLX's arrays come from malloc, and glibc keeps what lies between blocks that live: a
    worker that has served long answers held 110 MB of an empty cache. Only glibc has malloc_trim.
    """
    mx.clear_cache()
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
