"""Frees memory of kept KV, of encoded images and of idle live slots, for all callers.

The caller says how many bytes and for which reason; the reason decides what may go. One ranking
decides what goes first (`Evictor.free`); docs/cache.md describes it.
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
    """Why memory is freed. `Evictor.make_room`, which frees room for new KV, needs no reason."""

    MEMORY = "memory"  # a prompt or an answer has to fit, or the system is out of memory
    WARNING = "warning"  # the system is getting short of memory: live slots stay
    SLOTS = "slots"  # too many slots, or slots too old; the KV is kept where there is room
    AGE = "age"  # KV unused for the time to live


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """The cache of encoded images. An evicted image is encoded again when needed.

    All images that no running prefill reads go at once.
    """

    nbytes: Callable[[], int] = lambda: 0  # bytes that may go now
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
    """The KV that a prompt resumes from. It is not freed to make room for the same prompt."""

    pin: Pin = Pin("", (), (), ())
    slot: int | None = None

    @classmethod
    def of(cls, plan: ResumePlan, window: int) -> "Spared":
        """Return a plan's path, and the snapshot and windows that a resume at its end needs."""
        path = plan.path
        in_window = within_window(path[-1].end, window) if path else ()
        windows = tuple(extent for extent in in_window if extent.window is not None)
        last = tuple(e.end for e in path[-1:] if e.end.snapshot is not None)
        return cls(Pin("", path, windows, last), plan.slot)


NOTHING_SPARED = Spared()


class MemoryRelease:
    """Frees memory. Owner: the inference thread.

    Invariant: pinned and spared KV stays, and so do the paths of running requests. Rows of a
    spared path that only a slot holds are copied out before the slot goes.
    """

    def __init__(
        self,
        evictor: Evictor,
        slots: dict[int, LiveSlot],
        slot_bytes: Callable[[LiveSlot], int],
        release_slot: Callable[[LiveSlot, Collection[Extent] | None], None],
    ) -> None:
        """`release_slot(slot, kept)` empties a slot, as `KVManager.release_slot` does."""
        self.evictor = evictor
        self.slot_bytes = slot_bytes
        self.release_slot = release_slot
        self.images = EncodedImages()
        self.slots = slots

    def idle(self, spared: Spared = NOTHING_SPARED) -> list[LiveSlot]:
        """Return the slots that no request uses, least needed first, without the spared slot."""
        idle = (s for s in self.slots.values() if not s.is_busy and s.number != spared.slot)
        return sorted(idle, key=_need)

    def free(
        self,
        reason: Reason,
        nbytes: float = math.inf,
        *,
        spared: Spared = NOTHING_SPARED,
        slots: Sequence[LiveSlot] | None = None,
        expired: Collection[Extent] = (),
    ) -> int:
        """Free `nbytes`, or less if no more may go for this reason; return the freed bytes.

        Of the idle slots, only those in `slots` may go (None = all). For AGE, only `expired`
        extents may go.
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
            """Demand `slack` more of kept KV, so that not every call ranks all parts again."""
            return freed >= nbytes + (slack if following < (LIVE,) else 0)

        numbers = {slot.number for slot in slots}
        spared.pin.mark(1)
        try:
            if needs_memory:
                candidates += [*evictor.kept_parts(), self.images]
            elif reason is Reason.AGE:  # extents in released slots are removed with the slots
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
    """Rank a slot by its last use. A lost slot costs only a copy, so the next request matters most.

    The next request comes from a busy sub-agent rather than from the waiting orchestrator, although
    the orchestrator is more likely to return at all. A title or a topic check does not return.
    """
    return (not slot.is_spare, not slot.line.is_side, slot.used_at)


@dataclass(frozen=True, slots=True)
class _Slot:
    """An idle live slot, with the rows that only this slot holds."""

    memory: MemoryRelease
    slot: LiveSlot
    reason: Reason
    path: Sequence[Extent]  # the spared path
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
        live_bytes, count = memory.slot_bytes(slot), len(store)
        bytes_before = live_bytes + store.budget.bytes_used
        for extent in self.expired:
            if extent.holders == {slot.number}:
                store.remove(extent)
        memory.release_slot(slot, self.path if self.reason is Reason.MEMORY else None)
        if self.reason is Reason.SLOTS:
            return Freed(live_bytes, is_loss=False)
        nbytes = max(0, bytes_before - store.budget.bytes_used)
        if self.reason is Reason.AGE:
            return Freed(nbytes, parts=count - len(store))
        # Without the slot, further extents may be leaves.
        return Freed(nbytes, exposed=evictor.kept_parts())


def release_memory() -> None:
    """Give the system the memory that MLX and malloc keep for later. Takes milliseconds.

    On a CPU, MLX's arrays come from malloc, and glibc keeps the free memory between live blocks: a
    worker with an empty cache held 110 MB after long answers. Only glibc has malloc_trim.
    """
    mx.clear_cache()
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
