"""Reads ahead in idle time, and gives the memory of kept KV that is too old back.

The disk keeps what expires.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from hearth.worker.cache.block_hash import Tokens, prefix_hashes
from hearth.worker.cache.conversation_priority import Conversation
from hearth.worker.cache.eviction import find_expired
from hearth.worker.cache.extent_store import Extent
from hearth.worker.cache.prefix_search import (
    PrefixQuery,
    PrefixSearch,
    ResumePlan,
    choose_slot,
    make_plan,
    shared_cuts,
)
from hearth.worker.kv.kv_transfer import LiveSlot
from hearth.worker.kv.memory_release import Reason, release_memory

if TYPE_CHECKING:
    from hearth.worker.kv.disk_tier import DiskTier
    from hearth.worker.kv.kv_manager import KVManager

# A request that arrives waits for one step:
STEP_S: Final = 0.01  # of handing over to the disk, or the copy of one run
STEP_BYTES: Final = 1 << 26  # that go back to the system, or one run, or one live cache

log = logging.getLogger(__name__)


class IdleWork:
    """The part of a KVManager that idle time uses. Owner: the inference thread.

    Two kinds of work. What the next request would have to read is read in the session's own slot,
    from where that request would go on: nothing is read twice, and nothing copied. A trunk that was
    read already and is fast is read again in a slot of its own, a spare: its canonical copy is for
    whoever restores it.
    """

    def __init__(self, kv_manager: "KVManager", slots: dict[int, LiveSlot]) -> None:
        self._kv_manager = kv_manager
        self._slots = slots

    # ------------------------------------------------------------ what there is to do

    def unfinished(self, natural: Callable[[Tokens], list[int]]) -> PrefixQuery | None:
        """Return the beginning of a live slot's tokens that is to be read, if there is any.

        `natural` gives the cuts of every prompt that begins with some tokens. Nothing is to be
        done where stored KV is not canonical anyway.
        """
        rules, store = self._kv_manager.rules, self._kv_manager.store
        if rules.store_format is not None:
            return None
        for slot in sorted(self._slots.values(), key=lambda s: -s.used_at):
            if slot.is_busy or slot.is_spare or slot.is_settled:
                continue
            # Exact mode does not reuse what decoding wrote: the next request would have to read it.
            end = slot.position if rules.is_exact else slot.system_end
            if slot.canonical_to >= end:
                continue
            cuts = [cut for cut in natural(slot.tokens) if cut <= end]
            query = PrefixQuery(
                slot.tokens,
                cuts,
                prefix_hashes(slot.root.name, slot.tokens, cuts),
                Conversation(slot.line.number, slot.line.family),
                root=slot.root.name,
                images=slot.images,
                system_end=slot.system_end,
                adapter=slot.adapter,
            )
            if query.limit > PrefixSearch(store, query, is_exact=True).run().position:
                return query
            slot.is_settled = True
        return None

    def known_to(self, query: PrefixQuery) -> int:
        """Return up to where a request would read nothing of what idle time is to read."""
        is_its = any(slot.tokens is query.tokens for slot in self._slots.values())
        if is_its and not self._kv_manager.rules.is_exact:
            return query.limit  # it would go on behind all that the slot holds
        return min(query.limit, self._kv_manager.plan(query).position)

    # ------------------------------------------------------------ slots for it

    def open(
        self, query: PrefixQuery, is_foreseen: bool, has_room: Callable[[int], bool]
    ) -> LiveSlot | None:
        """Check out a slot for idle work, which ends at the query's last cut.

        `has_room` says whether so many bytes may be held more. None where that is not so, where
        sessions have all slots, or where there is nothing to read.
        """
        if is_foreseen or self._kv_manager.rules.is_exact:
            return self._open_own(query, has_room)
        return self._open_spare(query, has_room)

    def _open_own(self, query: PrefixQuery, has_room: Callable[[int], bool]) -> LiveSlot | None:
        """Check out the slot in which the session's next request would go on."""
        is_exact, best = self._kv_manager.rules.is_exact, self._kv_manager.plan(query)
        found = best.found
        if found is None or best.position >= query.limit:
            return None  # that request would read no more than what is behind its last cut
        line = found.path[-1].line if found.path else None
        own = [
            slot
            for slot in self._slots.values()
            if not slot.is_busy
            and (
                slot.is_spare
                or slot.tokens is query.tokens
                or (line is not None and slot.line is line)
            )
        ]
        plan = choose_slot(found, self._kv_manager.store, [s.view() for s in own], query, is_exact)
        if plan.position < best.position:
            return None  # only another session's slot holds it
        for slot in own:
            slot.is_settled |= slot.number != plan.slot  # what it holds is not what will be asked
        return self._filled(plan, query, is_exact, has_room)

    def _open_spare(self, query: PrefixQuery, has_room: Callable[[int], bool]) -> LiveSlot | None:
        """Check out a slot beside those of sessions, for what is to be canonical.

        None also where the work was done before and there was no room to keep it: nothing is
        prefilled in idle time twice either.
        """
        rules, slots = self._kv_manager.rules, self._slots.values()
        if rules.slots_max < 2:
            return None
        spares = [slot.view() for slot in slots if slot.is_spare]
        plan = make_plan(self._kv_manager.store, spares, query, is_exact=True)
        own = next((slot for slot in slots if slot.tokens is query.tokens), None)
        read_to = max(own.idle_prefilled_to, own.canonical_to) if own is not None else 0
        if plan.position + rules.chunk < read_to:
            return None
        return self._filled(plan, query, True, has_room)

    def _filled(
        self, plan: ResumePlan, query: PrefixQuery, is_exact: bool, has_room: Callable[[int], bool]
    ) -> LiveSlot | None:
        """Return a busy slot with what the plan goes on from; a new one takes a spare's place."""
        kv_manager, rows = self._kv_manager, query.limit
        spares = [slot for slot in self._slots.values() if slot.is_spare]
        if plan.slot is None and len(self._slots) - len(spares) >= kv_manager.rules.slots_max:
            return None
        there = self._slots[plan.slot] if plan.slot is not None else None
        if not has_room(kv_manager.cost_of(plan, rows)):
            return None
        if there is None:
            kv_manager.memory.free(Reason.SLOTS, slots=spares)
            plan = make_plan(kv_manager.store, [], query, is_exact)
        if there is not None:
            line = there.line
        elif plan.path:
            line = plan.path[-1].line
        else:
            line = kv_manager.lines.open(time.monotonic(), 1, query.conversation)
        is_spare = there is None or there.is_spare
        slot = kv_manager.fill(plan, query, line, rows)
        slot.is_spare = slot.is_settled = is_spare
        slot.canonical_cuts = shared_cuts(slot.canonical_cuts, query.cuts)
        slot.capacity = kv_manager.layers.reserve(slot.cache, rows)
        if kv_manager.disk is not None:
            kv_manager.disk.begin(slot, query)
        return slot

    # ------------------------------------------------------------ its end

    def settle(self, query: PrefixQuery) -> None:
        """Idle work for these tokens is done, or cannot be."""
        for slot in self._slots.values():
            if slot.tokens is query.tokens:
                slot.is_settled, slot.idle_prefilled_to = True, query.limit


class IdleExpiry:
    """Drops what was unused for the TTL, step by step, and only once the disk has it.

    What the disk will not have, for want of room or of its daily budget, is dropped all the same:
    it is offered once.
    Invariants: nothing is dropped while a request runs, nor anything that is pinned; until
    `_look_at` nothing can expire, since a use only makes KV younger.
    Owner: the inference thread.
    """

    def __init__(
        self, kv_manager: "KVManager", clock: Callable[[], float] = time.monotonic
    ) -> None:
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
        standing = [(slot.node, slot.used_at) for slot in all_slots]
        expired, next_at = find_expired(self._kv_manager.store, standing, now, self._ttl_s)
        slots = [slot for slot in all_slots if slot.used_at + self._ttl_s <= now]
        if not expired and not slots:
            # What comes anew has the whole TTL before it.
            expiring = [slot.used_at + self._ttl_s for slot in all_slots]
            self._look_at = min([next_at, now + self._ttl_s, *expiring])
            self._offered.clear()
            if self._freed_bytes:
                release_memory()
                mb, ttl_s = self._freed_bytes / 1e6, self._ttl_s
                log.info("%.1f MB of KV unused for %.0f s have left memory", mb, ttl_s)
                self._freed_bytes = 0
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

    def _offer(self, disk: "DiskTier", pending: Sequence[Extent]) -> bool:
        """Hand over to the disk what it lacks; say whether it takes more at once."""
        holders = {slot.number: slot for slot in self._kv_manager.slots}
        end = time.perf_counter() + STEP_S
        for extent in pending:
            was_drained = disk.thread.is_drained
            slot = holders[min(extent.holders)] if extent.holders else None
            if not disk.write(extent, slot) and not was_drained:
                self._waits_for_disk = True  # its queue is full
                return False
            self._offered.add(extent)  # refused by an empty queue it is too large to be written
            if time.perf_counter() > end:
                break
        return True
