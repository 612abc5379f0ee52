"""Manages the live slots and the kept KV of one model. Requests check slots out and in.

worker/cache/ decides and `KVTransfer` copies; this module calls both for each request.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hearth.shared.errors import Overloaded, RequestError
from hearth.worker.cache.block_hash import PrefixHash, Tokens, prefix_hashes
from hearth.worker.cache.conversation_priority import LinePriorities, LinePriority
from hearth.worker.cache.extent_store import Budget, Extent, ExtentStore, PrefixNode, path_to
from hearth.worker.cache.image_keys import ends_inside
from hearth.worker.cache.pinned_prompts import Pins
from hearth.worker.cache.prefix_search import (
    PrefixQuery,
    ResumePlan,
    line_for,
    make_plan,
    shared_cuts,
    take_over_path,
)
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import Record
from hearth.worker.kv.disk_tier import DiskRecall, DiskTier
from hearth.worker.kv.idle_work import IdleWork
from hearth.worker.kv.kv_transfer import KeepRules, KVTransfer, LiveSlot
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.memory_release import (
    NOTHING_SPARED,
    EncodedImages,
    MemoryRelease,
    Reason,
    Spared,
    release_memory,
)
from hearth.worker.kv.quantise_kv import QuantFormat

_NO_PLAN = ResumePlan.cold()
_RAW = KeepRules(slots_max=1, chunk=1, is_exact=True)  # no rows are packed


class KVManager:
    """All live slots and all kept KV of one model.

    `open` checks a slot out, `commit` follows each forward that fills the slot, and `close` checks
    the slot in, however the request ends. Prefilled KV is dropped only for lack of room.
    Invariants: a slot's layers hold exactly its tokens; a busy slot pins its node; there are at
    most `slots_max` slots.
    Owner: the inference thread.
    """

    def __init__(
        self,
        root: PrefixHash,
        layers: LayerMap,
        new_cache: Callable[[], list[Any]],
        budget: Budget,
        rules: KeepRules,
        disk_thread: DiskThread | None = None,
    ) -> None:
        self.rules = rules
        self.store = ExtentStore(root, layers.layout, budget)
        self.uncached = NullKVManager(new_cache, layers, rules)  # for requests without caching
        self.pins = Pins(self.store, rules.api_keys)
        self.layers = layers
        # Kept for one key: live KV, by the key's own root
        self._slots: dict[int, LiveSlot] = {}
        self.transfer = KVTransfer(self.store, layers, rules, self._slots, new_cache)
        self.memory = MemoryRelease(
            self.transfer.evictor, self._slots, self.slot_bytes, self.release_slot
        )
        self.lines = LinePriorities()
        self.idle_bytes_max = 1 << 62  # limit for the slots that no request uses
        self.idle_work = IdleWork(self, self._slots)
        self.disk: DiskTier | None = None
        if disk_thread is not None:
            self.disk = DiskTier(self.store, layers, self.transfer.evictor, rules, disk_thread)

    # ------------------------------------------------------------ a request's life

    def plan(self, query: PrefixQuery) -> ResumePlan:
        """Return the plan that `open` would execute now: the query's last plan, if still valid."""
        plan = query.plan
        if plan is None or not self._is_valid(plan):
            idle = [slot.view() for slot in self._slots.values() if not slot.is_busy]
            plan = query.plan = make_plan(self.store, idle, query, self.rules.is_exact)
        return plan

    def _is_valid(self, plan: ResumePlan) -> bool:
        """Whether a new search gives this plan: the store is unchanged, and the slot exists."""
        is_same = plan.found is not None and plan.found.version is self.store.version
        return is_same and (plan.slot is None or plan.slot in self._slots)

    def open(self, query: PrefixQuery, rows: int) -> tuple[LiveSlot, ResumePlan]:
        """Check out a slot with the kept beginning of the prompt, and with room for `rows` tokens.

        Return the slot and the plan that filled it.
        """
        plan = self.plan(query)
        if plan.slot is None and len(self._slots) >= self.rules.slots_max:
            # The KV of the least needed slot is kept, but never at the cost of the KV that this
            # prompt resumes from. The plan is made again: without room for the slot's KV, a part
            # of this prompt's KV may have gone with the slot.
            first, *_ = self.memory.idle()  # at least one: fewer requests run than there are slots
            self.memory.free(Reason.SLOTS, slots=[first], spared=self._spared(query))
            plan = self.plan(query)
        self.counts[f"match_{plan.kind}"] += 1
        self.counts["hybrid_trim_miss"] += plan.hybrid_trimmed
        self.counts["vlm_retreat"] += plan.is_retreat
        slot_line = self._slots[plan.slot].line if plan.slot is not None else None
        line = line_for(self.store, self.lines, plan, query, slot_line)
        slot = self.fill(plan, query, line, rows)
        take_over_path(line, plan, query, time.monotonic(), self.rules.ttl_s)
        slot.node.resumed += plan.position > 0
        slot.is_spare = slot.is_idle_work_done = False
        # The last forward of another prompt may end at a cut that this prompt does not have.
        slot.canonical_cuts = shared_cuts(slot.canonical_cuts, query.cuts)
        slot.capacity = self.layers.reserve(slot.cache, rows)
        self._check_depth(slot)
        if self.disk is not None:
            self.disk.begin(slot, query)
        assert slot.position == plan.position <= query.limit, (slot.position, plan.position)
        assert slot.capacity >= rows, (slot.capacity, rows)
        return slot, plan

    def commit(
        self, slot: LiveSlot, tokens: Tokens, name: PrefixHash, *, is_fast: bool = False
    ) -> None:
        """Keep the KV up to the cut `name` at the end of `tokens`.

        `is_fast`: the forwards were smaller than those of a cold run.
        """
        start, end = slot.position, len(tokens)
        assert slot.is_busy and start < end, (slot.is_busy, start, end)
        is_canonical = slot.is_canonical and not is_fast
        slot.is_idle_work_done |= is_fast
        slot.tokens = tokens
        if is_canonical:
            slot.canonical_cuts.append(end)
        self._check_depth(slot)
        if is_canonical or not self.rules.is_exact:
            self.transfer.index(slot, start, end, name, is_canonical)
        if self.disk is not None:
            self.disk.record_read(slot)
        self.transfer.quantise(slot, end)

    def grow(self, slot: LiveSlot, rows: int) -> None:
        """Make room for `rows` tokens before a decode step; quantise the slot if that is due."""
        assert slot.is_busy and rows > slot.position, (slot.is_busy, rows, slot.position)
        if rows > slot.capacity:
            slot.capacity = self.layers.reserve(slot.cache, rows)
        if slot.format is None and self.rules.format_at(rows) is not None:
            self.transfer.quantise(slot, rows)
            slot.capacity = self.layers.reserve(slot.cache, rows)
        assert slot.capacity >= rows, (slot.capacity, rows)

    def grow_for_draft(self, slot: LiveSlot, rows: int, draft_rows: int) -> int:
        """Make room for `rows` and for a draft; return how many rows of the draft fit.

        A draft gets no rows if some of these would be packed.
        """
        self.grow(slot, rows)
        if slot.format is None and self.rules.format_at(rows + draft_rows) is not None:
            return 0
        self.grow(slot, rows + draft_rows)
        return draft_rows

    def limit_growth(self, has_room: Callable[[int], bool]) -> None:
        """Let live caches grow by a quarter only if `has_room(nbytes)` is true for the growth."""
        self.layers.has_room = has_room

    def set_images(self, images: EncodedImages) -> None:
        """Release encoded images too when memory is needed."""
        self.memory.images = images

    def lend_bytes(self, slot: LiveSlot) -> int:
        """Return how many bytes `lend` would copy."""
        tokens = sum(len(extent.tokens) for extent in self.transfer.unshared_extents(slot))
        return min(tokens * self.row_bytes(slot.format), self.store.budget.free_bytes)

    def lend(self, slot: LiveSlot) -> None:
        """Copy out rows that only this slot holds, before the cache is merged into a batch."""
        assert slot.is_busy and not slot.lent_extents, "the slot's rows are in a batch"
        slot.lent_extents = slot.held_extents
        self.transfer.release_rows(slot, 0)
        slot.cache, slot.capacity = [], 0

    def take_back(self, slot: LiveSlot, cache: list[Any]) -> None:
        """Give a slot its rows back from a batch. `cache` holds these and the generated rows."""
        assert slot.is_busy and not slot.cache, "the slot holds rows of its own"
        slot.cache = cache
        self.transfer.hold_lent_extents(slot)

    def close(self, slot: LiveSlot, cache: list[Any], tokens: Tokens, is_prefilled: bool) -> None:
        """Check the slot in. `cache` holds `tokens`, generated tokens included.

        `is_prefilled`: the prompt was prefilled to its last cut.
        """
        assert slot.is_busy and slot.position <= len(tokens), (slot.position, len(tokens))
        slot.cache, slot.tokens = cache, tokens
        self._check_depth(slot)
        self.transfer.hold_lent_extents(slot)
        if slot.node.is_dropped:
            self.transfer.reindex(slot)
        start = slot.node.position
        assert start <= len(tokens), (start, len(tokens))
        is_whole = not ends_inside(slot.images, len(tokens))  # no prompt resumes within an image
        if slot.node.arrival is not None:
            slot.node.is_prompt_end |= is_prefilled
            is_own = slot.line.tip is None and slot.position > slot.system_end
            if is_prefilled or is_own:
                slot.line.tip = slot.node.name
        if len(tokens) > start and is_whole and not self.rules.is_exact:
            (name,) = prefix_hashes(slot.root.name, tokens, [len(tokens)])
            self.transfer.index(slot, start, len(tokens), name, is_canonical=False)
        self._check_in(slot)

    # ------------------------------------------------------------ memory

    def share_out(self, kept_bytes: int, idle_bytes: int) -> None:
        """Limit kept KV to `kept_bytes` and idle slots to `idle_bytes` from now on."""
        self.store.budget.bytes_max, self.idle_bytes_max = kept_bytes, idle_bytes
        self._release_surplus_slots()
        self.transfer.evictor.make_room(0, 0, math.inf, time.monotonic())

    def _release_surplus_slots(self) -> None:
        """Release idle slots above the slots' limit, so that kept KV has its share of the memory.

        The most needed idle slot always stays, so that its conversation continues without a copy.
        """
        idle = self.memory.idle()
        surplus = sum(map(self.slot_bytes, idle)) - self.idle_bytes_max
        if surplus > 0 and len(idle) > 1:
            self.memory.free(Reason.SLOTS, surplus, slots=idle[:-1])

    def slot_cost(self, query: PrefixQuery, rows: int) -> int:
        """Return the bytes to allocate for the prompt's slot with room for `rows` tokens."""
        return self.plan_cost(self.plan(query), rows)

    def plan_cost(self, plan: ResumePlan, rows: int) -> int:
        """Return the bytes to allocate for the plan's slot with room for `rows` tokens."""
        slot = self._slots[plan.slot] if plan.slot is not None else None
        if slot is not None and slot.capacity >= rows:
            return 0
        allocated = self.slot_bytes(slot) if slot is not None else 0
        return max(0, self.uncached.cold_bytes(rows) - allocated)

    def copied_bytes(self, query: PrefixQuery) -> int:
        """Return the bytes of the kept rows that will be copied into the prompt's new slot.

        When memory is needed, these kept rows then go before all other KV.
        """
        plan = self.plan(query)
        return self.transfer.copied_bytes(plan) if plan.slot is None else 0

    def releasable(self, query: PrefixQuery | None = None) -> int:
        """Return how many bytes `release` could free for `query`."""
        spared = self._spared(query)
        path = spared.pin.path
        kept = self.store.budget.bytes_used - self.pins.nbytes - spared.pin.nbytes
        kept -= self.transfer.in_use_bytes(path)
        idle = self.memory.idle(spared)
        numbers = {slot.number for slot in idle}
        copied = [e for e in path if e.body is None and e.holders and e.holders <= numbers]
        copied_bytes = sum(len(extent.tokens) for extent in copied) * self.row_bytes(None)
        live = max(0, sum(map(self.slot_bytes, idle)) - copied_bytes)
        return max(0, kept) + live + self.memory.images.nbytes()

    def release(
        self,
        nbytes: int,
        query: PrefixQuery | None = None,
        reason: Reason = Reason.MEMORY,
    ) -> None:
        """Free `nbytes` of KV that neither running requests nor the prompt `query` need.

        If the model has a disk, the KV stays there.
        """
        self.memory.free(reason, nbytes, spared=self._spared(query))

    def _spared(self, query: PrefixQuery | None) -> Spared:
        """Return the KV and the slot from which a prompt would resume now."""
        if query is None:
            return NOTHING_SPARED
        return Spared.of(self.plan(query), self.store.layout.window)

    # ------------------------------------------------------------ pins

    def pin(self, slot: LiveSlot, pin_id: str, api_key: str) -> None:
        """Pin the slot's prompt, which was prefilled to its last cut, until `unpin`.

        The prompt's KV is copied into the store at once, so that the pin does not depend on a slot.

        Raises:
            RequestError: 400, 409 or 503; nothing is pinned, but other KV may have been evicted.
        """
        if slot.node.is_dropped:
            self.transfer.reindex(slot)
        path = path_to(slot.node)
        if not path:
            raise RequestError(
                f"The prompt is {slot.position} tokens up to where it could be resumed; there is "
                "nothing to pin.",
                code="not_kept",
            )
        self.pins.check(pin_id, api_key, path, *self.transfer.lacking(slot, path))
        self.pins.add(pin_id, api_key, path)  # first, so that making room evicts none of the path
        is_whole = slot.node.position == slot.position and self.transfer.complete(slot, path)
        if not is_whole:
            self.pins.drop(pin_id)
            raise Overloaded("There is no room for what is to be pinned now; try again.")
        self.pins.add(pin_id, api_key, path)  # again, with the copied windows and snapshots

    def unpin(self, pin_id: str, api_key: str) -> bool:
        """Drop a pin of `api_key` ("" = any key); return whether there was such a pin."""
        return self.pins.drop(pin_id, api_key)

    # ------------------------------------------------------------ the disk

    def recall(
        self, query: PrefixQuery, on_read: Callable[[Sequence[Record | None]], None]
    ) -> DiskRecall | None:
        """Read the prompt's KV from disk; the I/O thread calls `on_read` with the records.

        Return None where there is nothing to read.
        """
        if self.disk is None:
            return None
        recall = self.disk.wanted(query, self.plan(query), self.rules.is_exact)
        return (
            recall if recall is not None and self.disk.thread.read(recall.names, on_read) else None
        )

    def take_in(self, records: Sequence[Record | None], query: PrefixQuery) -> int:
        """Put records that were read for a prompt into the store; return the restored tokens."""
        assert self.disk is not None
        line = LinePriority(0, 0.0, 0.0)  # not used if no record was read
        if records and records[0] is not None:
            line = self.lines.open(time.monotonic(), 1, query.conversation)
            self.lines.end_request(line, time.monotonic())
        found = self.plan(query).found
        assert found is not None, "records were read for a prompt without a search"
        tip = max(found.reached, key=lambda node: node.position)
        return self.disk.take_in(records, query, tip, line)

    def disk_report(self) -> dict[str, Any] | None:
        """Return the disk's figures for `/v1/cache`; None where there is no disk."""
        if self.disk is None:
            return None
        report, counts = self.disk.thread.report(), +self.disk.counts  # `+` drops counts of 0
        return report | {"counts": report["counts"] | dict(counts)}

    def queue_unwritten(self) -> None:
        """At shutdown, queue all KV that conversations continue from and that is not on disk."""
        if self.disk is not None:
            self.disk.write_rest(self._slots.values())

    def close_disk(self, flush_s: float) -> None:
        """Write queued records for at most `flush_s`, then end the I/O thread. For any thread."""
        if self.disk is not None:
            self.disk.thread.flush(flush_s)
            self.disk.thread.close()

    def _check_in(self, slot: LiveSlot) -> None:
        if self.disk is not None:
            self.disk.end(slot)
        assert slot.is_busy and slot.node.pins > 0, (slot.is_busy, slot.node.pins)
        slot.node.pins -= 1
        slot.is_busy, slot.used_at = False, time.monotonic()
        self.store.invalidate_plans()  # a prompt may continue in the slot
        self.lines.end_request(slot.line, slot.used_at)
        self._release_surplus_slots()

    # ------------------------------------------------------------ idle time

    def close_spare(self, slot: LiveSlot) -> None:
        if slot.node.is_dropped:
            self.transfer.reindex(slot)
        self._check_in(slot)

    def sweep(self) -> bool:
        """Release the slots of sessions that were idle for long; return whether there were any."""
        now, idle_s = time.monotonic(), self.rules.session_idle_s
        old = [s for s in self._slots.values() if not s.is_busy and now - s.used_at > idle_s]
        if self.disk is not None:
            self.disk.write_quiet(self._slots.values())
        if idle_s and old:
            self.memory.free(Reason.SLOTS, slots=old)
        self.lines.forget({extent.line for extent in self.store.extents})
        return bool(old and idle_s)

    # ------------------------------------------------------------ operators

    def clear(self) -> None:
        """Forget all kept KV, also on disk, including other workers' files of this model.

        Slots of running requests stay, and are kept when the requests end. The freed memory goes
        back to the system.
        """
        for slot in self.slots:
            if not slot.is_busy:
                del self._slots[slot.number]
            slot.held_extents, slot.lent_extents = [], []
        self.pins.clear()
        self.store.clear()
        if self.disk is not None:
            self.disk.thread.clear()
        release_memory()

    @property
    def counts(self) -> Counter[str]:
        return self.transfer.counts

    @property
    def evictions(self) -> int:
        return self.transfer.evictor.evictions

    @property
    def slots(self) -> Sequence[LiveSlot]:
        return list(self._slots.values())

    def slot_bytes(self, slot: LiveSlot) -> int:
        return self.layers.nbytes(slot.cache)

    def row_bytes(self, form: QuantFormat | None) -> int:
        """Return the bytes of one token's rows in `form`."""
        return self.layers.row_cost(form)[0]

    # ------------------------------------------------------------ slots and lines

    def fill(self, plan: ResumePlan, query: PrefixQuery, line: LinePriority, rows: int) -> LiveSlot:
        """Return a busy slot filled with the KV that the plan resumes from."""
        assert plan.position == 0 or self._is_valid(plan), "the plan is no longer valid"
        self.store.invalidate_plans()  # no other prompt may continue in this slot
        if plan.slot is not None:
            slot = self._slots[plan.slot]
            slot.is_busy, slot.line = True, line
            self.transfer.rewind(slot, plan)
        else:
            assert len(self._slots) < self.rules.slots_max, (len(self._slots), self.rules.slots_max)
            number = min(set(range(self.rules.slots_max)) - self._slots.keys())
            root = self.store.root_of(query.root)
            slot = self._slots[number] = LiveSlot(number, [], root, line)
            self.transfer.restore(slot, plan, rows)
        assert slot.root is self.store.root_of(query.root), "the slot's root is not the prompt's"
        slot.adapter = query.adapter  # one adapter may have two names
        slot.node.pins += 1
        slot.images = tuple(run.bare() for run in query.images)
        slot.system_end = query.system_end
        self.transfer.quantise(slot, plan.position)
        return slot

    def release_slot(self, slot: LiveSlot, kept: Collection[Extent] | None = None) -> None:
        """Empty an idle slot. Rows that only this slot holds are copied out first.

        With `kept`, only these extents are copied; None = each extent that is worth its room.
        """
        assert not slot.is_busy and self._slots[slot.number] is slot, (slot.number, slot.is_busy)
        if self.disk is not None:
            self.disk.write_before_release(slot)
        self.transfer.release_rows(slot, 0, kept)
        slot.cache = []
        del self._slots[slot.number]

    def _check_depth(self, slot: LiveSlot) -> None:
        """Assert that the slot's layers hold `slot.position` tokens."""
        depth = self.layers.depth(slot.cache)
        assert depth is None or depth == slot.position, (depth, slot.position)


class NullKVManager:
    """A KV manager that keeps nothing: each request runs in an empty slot of its own.

    With `layers` and `rules`, slots grow and are packed as in `KVManager`, so that a request
    computes the same as with an empty `KVManager`. Without these arguments a slot's bytes are
    unknown, and reported as 0. Tests compare a warm cache with this class.
    Owner: the inference thread.
    """

    def __init__(
        self,
        new_cache: Callable[[], list[Any]],
        layers: LayerMap | None = None,
        rules: KeepRules = _RAW,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._images = EncodedImages()
        self._new_cache = new_cache
        self._layers = layers
        self._rules = rules

    @property
    def uncached(self) -> "NullKVManager":
        """The KV manager for requests without caching."""
        return self

    def plan(self, query: PrefixQuery) -> ResumePlan:
        return _NO_PLAN

    def open(self, query: PrefixQuery, rows: int) -> tuple[LiveSlot, ResumePlan]:
        self.counts["match_miss"] += 1
        node = PrefixNode(PrefixHash(b""), 0)
        slot = LiveSlot(0, self._new_cache(), node, LinePriority(0, 0.0, 0.0))
        self._fit(slot, 0, rows)
        return slot, _NO_PLAN

    def slot_cost(self, query: PrefixQuery, rows: int) -> int:
        return self.cold_bytes(rows)

    def copied_bytes(self, query: PrefixQuery) -> int:
        return 0

    def cold_bytes(self, rows: int) -> int:
        """Return the bytes of an empty slot with room for `rows` tokens."""
        form = self._rules.format_at(rows)
        return 0 if self._layers is None else self._layers.slot_bytes(rows, form)

    def unwritten_bytes(self, rows: int) -> int:
        """Return the part of `cold_bytes` that the first forward allocates: windows and states."""
        return 0 if self._layers is None else self._layers.unwritten_bytes(rows)

    def releasable(self, query: PrefixQuery | None = None) -> int:
        return self._images.nbytes()

    def release(
        self,
        nbytes: int,
        query: PrefixQuery | None = None,
        reason: Reason = Reason.MEMORY,
    ) -> None:
        if self._images.nbytes():  # a request that waits for memory calls this at every step
            self._images.release()

    def recall(self, query: PrefixQuery, on_read: Callable[[Any], None]) -> None:
        """Do nothing: there is nothing to read."""

    def take_in(self, records: Sequence[Any], query: PrefixQuery) -> int:
        return 0

    def commit(
        self, slot: LiveSlot, tokens: Tokens, name: PrefixHash, *, is_fast: bool = False
    ) -> None:
        slot.tokens = tokens
        self._quantise(slot, len(tokens))

    def grow(self, slot: LiveSlot, rows: int) -> None:
        self._fit(slot, rows, rows)

    def grow_for_draft(self, slot: LiveSlot, rows: int, draft_rows: int) -> int:
        self.grow(slot, rows)
        if slot.format is None and self._rules.format_at(rows + draft_rows) is not None:
            return 0  # rows would have to be packed within the draft
        self.grow(slot, rows + draft_rows)
        return draft_rows

    def limit_growth(self, has_room: Callable[[int], bool]) -> None:
        """Do nothing: `KVManager.limit_growth` has set the limit of the shared layer map."""

    def set_images(self, images: EncodedImages) -> None:
        self._images = images

    def lend(self, slot: LiveSlot) -> None:
        slot.cache, slot.capacity = [], 0

    def take_back(self, slot: LiveSlot, cache: list[Any]) -> None:
        slot.cache = cache

    def lend_bytes(self, slot: LiveSlot) -> int:
        return 0

    def close(self, slot: LiveSlot, cache: list[Any], tokens: Tokens, is_prefilled: bool) -> None:
        """Do nothing: the slot's memory is freed with the slot."""

    def pin(self, slot: LiveSlot, pin_id: str, api_key: str) -> None:
        """Raises: RequestError: always."""
        raise RequestError(
            "Nothing can be pinned: this model's KV is not kept. Prompts are read anew each time.",
            code="not_kept",
        )

    def unpin(self, pin_id: str, api_key: str) -> bool:
        return False

    def queue_unwritten(self) -> None:
        """Do nothing: there is no disk."""

    def close_disk(self, flush_s: float) -> None:
        """Do nothing: there is no I/O thread."""

    def sweep(self) -> bool:
        return False

    def clear(self) -> None:
        """Do nothing: there is no kept KV."""

    @property
    def slots(self) -> Sequence[LiveSlot]:
        return []

    def _fit(self, slot: LiveSlot, position: int, rows: int) -> None:
        """Pack the slot's rows if `position` tokens are enough to pack; make room for `rows`."""
        was_packed = self._quantise(slot, position)
        if self._layers is not None and (was_packed or rows > slot.capacity):
            slot.capacity = self._layers.reserve(slot.cache, rows)
            assert slot.capacity >= rows, (slot.capacity, rows)

    def _quantise(self, slot: LiveSlot, position: int) -> bool:
        """Pack the slot's rows once there are enough; return whether this call did so."""
        form = self._rules.format_at(position)
        if form is None or slot.format is not None or self._layers is None:
            return False
        self._layers.quantise(slot.cache, form)
        slot.format = form
        return True
