"""Prefills ahead in idle time, and frees the memory of kept KV that is too old.

The disk keeps the expired KV.
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

# An arriving request waits for the end of one step, so a step is small:
STEP_S: Final = 0.01  # time for handing extents to the disk; a step copies at least one extent
STEP_BYTES: Final = 1 << 26  # freed in a step; a step frees at least one extent or live slot

log = logging.getLogger(__name__)


class IdleWork:
    """The part of a KVManager that idle time uses. Owner: the inference thread.

    There are two kinds of work. Tokens that the session's next request would prefill are prefilled
    in the session's own slot, from the position at which that request would resume: no token is
    read twice, and no KV is copied. A trunk with fast KV is prefilled again in a spare slot, and
    other requests restore the canonical copy.
    """

    def __init__(self, kv_manager: "KVManager", slots: dict[int, LiveSlot]) -> None:
        self._kv_manager = kv_manager
        self._slots = slots

    # ------------------------------------------------------------ finding work

    def unfinished(self, natural: Callable[[Tokens], list[int]]) -> PrefixQuery | None:
        """Return the first tokens of a live slot that idle time should prefill; None: no work.

        `natural` returns the cuts of every prompt that begins with the given tokens. KV that is
        stored in fewer bits is never canonical, so with such a setting there is no work.
        """
        rules, store = self._kv_manager.rules, self._kv_manager.store
        if rules.store_format is not None:
            return None
        for slot in sorted(self._slots.values(), key=lambda s: -s.used_at):
            if slot.is_busy or slot.is_spare or slot.is_idle_work_done:
                continue
            # Exact mode does not reuse decoded KV: the next request would prefill the tokens again.
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
            slot.is_idle_work_done = True
        return None

    def reusable_to(self, query: PrefixQuery) -> int:
        """Return the position at which a request for the query's tokens would resume now."""
        is_in_slot = any(slot.tokens is query.tokens for slot in self._slots.values())
        if is_in_slot and not self._kv_manager.rules.is_exact:
            return query.limit  # the request would continue after the slot's last token
        return min(query.limit, self._kv_manager.plan(query).position)

    # ------------------------------------------------------------ slots for the work

    def open(
        self, query: PrefixQuery, is_foreseen: bool, has_room: Callable[[int], bool]
    ) -> LiveSlot | None:
        """Check out a slot for idle work, which ends at the query's last cut.

        `is_foreseen`: a request with these tokens is expected. `has_room(nbytes)` says whether
        `nbytes` may be allocated. Return None without room, if sessions use all slots, or if there
        is nothing to prefill.
        """
        if is_foreseen or self._kv_manager.rules.is_exact:
            return self._open_own(query, has_room)
        return self._open_spare(query, has_room)

    def _open_own(self, query: PrefixQuery, has_room: Callable[[int], bool]) -> LiveSlot | None:
        """Check out the slot in which the session's next request would continue."""
        is_exact, best = self._kv_manager.rules.is_exact, self._kv_manager.plan(query)
        found = best.found
        if found is None or best.position >= query.limit:
            return None  # the request would prefill only tokens after the last cut
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
            return None  # only another session's slot holds the KV
        for slot in own:
            # The next request will not have the tokens of any other slot.
            slot.is_idle_work_done |= slot.number != plan.slot
        return self._filled(plan, query, is_exact, has_room)

    def _open_spare(self, query: PrefixQuery, has_room: Callable[[int], bool]) -> LiveSlot | None:
        """Check out a spare slot, which is no session's, to make KV canonical.

        Also return None if this work was done before and the KV was evicted since: idle time
        prefills no tokens twice.
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
        """Return a busy slot with the KV of the plan. A new slot replaces the spare slots."""
        kv_manager, rows = self._kv_manager, query.limit
        spares = [slot for slot in self._slots.values() if slot.is_spare]
        if plan.slot is None and len(self._slots) - len(spares) >= kv_manager.rules.slots_max:
            return None
        planned_slot = self._slots[plan.slot] if plan.slot is not None else None
        if not has_room(kv_manager.plan_cost(plan, rows)):
            return None
        if planned_slot is None:
            kv_manager.memory.free(Reason.SLOTS, slots=spares)
            plan = make_plan(kv_manager.store, [], query, is_exact)
        if planned_slot is not None:
            line = planned_slot.line
        elif plan.path:
            line = plan.path[-1].line
        else:
            line = kv_manager.lines.open(time.monotonic(), 1, query.conversation)
        is_spare = planned_slot is None or planned_slot.is_spare
        slot = kv_manager.fill(plan, query, line, rows)
        slot.is_spare = slot.is_idle_work_done = is_spare
        slot.canonical_cuts = shared_cuts(slot.canonical_cuts, query.cuts)
        slot.capacity = kv_manager.layers.reserve(slot.cache, rows)
        if kv_manager.disk is not None:
            kv_manager.disk.begin(slot, query)
        return slot

    # ------------------------------------------------------------ end of the work

    def finish(self, query: PrefixQuery) -> None:
        """Record that idle work for the query's tokens is done or impossible."""
        for slot in self._slots.values():
            if slot.tokens is query.tokens:
                slot.is_idle_work_done, slot.idle_prefilled_to = True, query.limit


class IdleExpiry:
    """Drops KV that was unused for the TTL, step by step, after offering the KV to the disk.

    KV that the disk refuses, for lack of room or because of the daily budget, is dropped too.
    Invariants: no KV is dropped while a request runs, and no pinned KV is dropped; before
    `_next_at` no KV can expire, since a use only makes KV younger.
    Owner: the inference thread.
    """

    def __init__(
        self, kv_manager: "KVManager", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kv_manager = kv_manager
        self._clock = clock
        self._ttl_s = kv_manager.rules.ttl_s
        self._next_at = 0.0 if self._ttl_s else math.inf
        self._offered: set[Extent] = set()  # expired extents that were offered to the disk
        self._waits_for_disk = False  # whether to wait until the disk has written its queue
        self._freed_bytes = 0  # bytes freed since the last time that no expired KV was left

    def step(self) -> bool:
        """Work for some milliseconds; return whether there is more to do at once."""
        now, disk, all_slots = self._clock(), self._kv_manager.disk, self._kv_manager.slots
        if now < self._next_at or any(slot.is_busy for slot in all_slots):
            return False
        is_drained = disk is None or disk.thread.is_drained
        if self._waits_for_disk and not is_drained:
            return False  # the inference thread calls again soon
        self._waits_for_disk = False
        standing = [(slot.node, slot.used_at) for slot in all_slots]
        expired, next_at = find_expired(self._kv_manager.store, standing, now, self._ttl_s)
        slots = [slot for slot in all_slots if slot.used_at + self._ttl_s <= now]
        if not expired and not slots:
            # New KV cannot expire before a whole TTL has passed.
            expiring = [slot.used_at + self._ttl_s for slot in all_slots]
            self._next_at = min([next_at, now + self._ttl_s, *expiring])
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
        memory = self._kv_manager.memory  # slots go last, each as a whole: no prompt finds a half
        self._freed_bytes += memory.free(
            Reason.AGE, STEP_BYTES, slots=slots, expired=dict.fromkeys(expired)
        )
        return True

    # ------------------------------------------------------------ to disk

    def _offer(self, disk: "DiskTier", pending: Sequence[Extent]) -> bool:
        """Queue extents for the disk; return whether the disk accepts more at once."""
        holders = {slot.number: slot for slot in self._kv_manager.slots}
        end = time.perf_counter() + STEP_S
        for extent in pending:
            was_drained = disk.thread.is_drained
            slot = holders[min(extent.holders)] if extent.holders else None
            if not disk.write(extent, slot) and not was_drained:
                self._waits_for_disk = True  # the disk's queue is full
                return False
            self._offered.add(extent)  # even if refused: what an empty queue refuses never fits
            if time.perf_counter() > end:
                break
        return True
