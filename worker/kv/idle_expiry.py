"""Gives the memory of expired KV back to the system in idle time; the disk keeps the KV."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from hearth.worker.cache.expiry import Expired, find_expired
from hearth.worker.cache.extent_store import Extent
from hearth.worker.kv.kv_manager import KVManager
from hearth.worker.kv.live_slot import LiveSlot
from hearth.worker.kv.memory_release import Reason
from hearth.worker.kv.return_freed_memory import release_memory

# A request that arrives waits for one step:
STEP_S: Final = 0.01  # of handing over to the disk, or the copy of one run
STEP_BYTES: Final = 1 << 26  # that go back to the system, or one run, or one live cache

log = logging.getLogger(__name__)


class IdleExpiry:
    """Drops what was unused for the TTL, step by step, and only once the disk has it.

    What the disk will not have, for want of room or of its daily budget, is dropped all the same:
    it is offered once.
    Invariants: nothing is dropped while a request runs, nor anything that is pinned; until
    `_look_at` nothing can expire, since a use only makes KV younger.
    Owner: the inference thread.
    """

    def __init__(self, kv_manager: KVManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._kv_manager = kv_manager
        self._clock = clock
        self._ttl_s = kv_manager.rules.ttl_s
        self._look_at = 0.0 if self._ttl_s else math.inf
        self._offered: set[Extent] = set()  # to the disk, of what is to be dropped next
        self._waits_for_disk = False  # until it has written all that it took
        self._freed_bytes = 0  # since the last look that found nothing

    def step(self) -> bool:
        """Do some milliseconds of work; say whether more is to be done at once."""
        now = self._clock()
        if now < self._look_at or any(slot.is_busy for slot in self._kv_manager.slots):
            return False
        if self._waits_for_disk and not self._is_drained:
            return False  # the loop comes back soon
        self._waits_for_disk = False
        expired, slots = self._find(now)
        if not expired.extents and not slots:
            self._look_at = self._next_look(expired, now)
            self._end()
            return False
        pending = [extent for extent in expired.extents if self._is_wanted_on_disk(extent)]
        if pending:
            return self._offer(pending)
        if not self._is_drained:
            self._waits_for_disk = True
            return False
        memory = self._kv_manager.memory  # a slot goes whole, and last: nobody finds half of one
        self._freed_bytes += memory.free(
            Reason.AGE, STEP_BYTES, slots=slots, expired=dict.fromkeys(expired.extents)
        )
        return True

    def _find(self, now: float) -> tuple[Expired, list[LiveSlot]]:
        """Return the extents and the slots that are out of date."""
        slots = self._kv_manager.slots
        standing = [(slot.joint, slot.used_at) for slot in slots]
        expired = find_expired(self._kv_manager.store, standing, now, self._ttl_s)
        return expired, [slot for slot in slots if slot.used_at + self._ttl_s <= now]

    def _next_look(self, expired: Expired, now: float) -> float:
        """Return before when nothing expires: what comes anew has the whole TTL before it."""
        slots = [slot.used_at + self._ttl_s for slot in self._kv_manager.slots]
        return min([expired.next_at, now + self._ttl_s, *slots])

    # ------------------------------------------------------------ to disk

    @property
    def _is_drained(self) -> bool:
        disk = self._kv_manager.disk
        return disk is None or disk.thread.is_drained

    def _is_wanted_on_disk(self, extent: Extent) -> bool:
        disk = self._kv_manager.disk
        if disk is None or extent in self._offered:
            return False
        return not extent.is_stored or disk.thread.has_lost

    def _offer(self, pending: Sequence[Extent]) -> bool:
        """Hand over to the disk what it lacks; say whether it takes more at once."""
        disk = self._kv_manager.disk
        assert disk is not None
        holders = {slot.number: slot for slot in self._kv_manager.slots}
        end = time.perf_counter() + STEP_S
        for extent in pending:
            was_drained = self._is_drained
            slot = holders[min(extent.holders)] if extent.holders else None
            if not disk.writer.write(extent, slot) and not was_drained:
                self._waits_for_disk = True  # its queue is full
                return False
            self._offered.add(extent)  # refused by an empty queue it is too large to be written
            if time.perf_counter() > end:
                break
        return True

    def _end(self) -> None:
        """Say what went, where anything did, and have the system get all of it."""
        self._offered.clear()
        if self._freed_bytes:
            release_memory()
            mb, ttl_s = self._freed_bytes / 1e6, self._ttl_s
            log.info("%.1f MB of KV unused for %.0f s have left memory", mb, ttl_s)
            self._freed_bytes = 0
