"""Gives the memory of expired KV back to the system in idle time; the disk keeps the KV."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from hearth.worker.cache.eviction import find_expired
from hearth.worker.cache.extent_store import Extent
from hearth.worker.kv.disk_tier import DiskTier
from hearth.worker.kv.kv_manager import KVManager
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
        now, disk, all_slots = self._clock(), self._kv_manager.disk, self._kv_manager.slots
        if now < self._look_at or any(slot.is_busy for slot in all_slots):
            return False
        is_drained = disk is None or disk.thread.is_drained
        if self._waits_for_disk and not is_drained:
            return False  # the loop comes back soon
        self._waits_for_disk = False
        standing = [(slot.joint, slot.used_at) for slot in all_slots]
        expired, next_at = find_expired(self._kv_manager.store, standing, now, self._ttl_s)
        slots = [slot for slot in all_slots if slot.used_at + self._ttl_s <= now]
        if not expired and not slots:
            # What comes anew has the whole TTL before it.
            expiring = [slot.used_at + self._ttl_s for slot in all_slots]
            self._look_at = min([next_at, now + self._ttl_s, *expiring])
            self._end()
            return False
        if disk is not None:
            has_lost = disk.thread.has_lost
            lacking = [extent for extent in expired if has_lost or not extent.is_stored]
            if pending := [extent for extent in lacking if extent not in self._offered]:
                return self._offer(disk, pending)
        if not is_drained:
            self._waits_for_disk = True
            return False
        memory = self._kv_manager.memory  # a slot goes whole, and last: nobody finds half of one
        self._freed_bytes += memory.free(
            Reason.AGE, STEP_BYTES, slots=slots, expired=dict.fromkeys(expired)
        )
        return True

    # ------------------------------------------------------------ to disk

    def _offer(self, disk: DiskTier, pending: Sequence[Extent]) -> bool:
        """Hand over to the disk what it lacks; say whether it takes more at once."""
        holders = {slot.number: slot for slot in self._kv_manager.slots}
        end = time.perf_counter() + STEP_S
        for extent in pending:
            was_drained = disk.thread.is_drained
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
