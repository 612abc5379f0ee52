"""Manages the live slots and the kept KV of one model: requests check slots out and in here.

Decisions are made in worker/cache/, and `KVTransfer` moves bytes; this module leads a request
through both.
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
    line_of,
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
    NOTHING,
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
    """All live slots and all that is kept of one model.

    `open` checks a slot out, `commit` follows each forward that fills it, and `close` checks it
    in, however its request ends. Nothing prefilled is thrown away but for want of room.
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
        self.uncached = NullKVManager(new_cache, layers, rules)  # of what is not to be kept
        self.pins = Pins(self.store, rules.keys)
        self.layers = layers
        # Kept for one key: live KV, by the key's own root
        self._slots: dict[int, LiveSlot] = {}
        self.transfer = KVTransfer(self.store, layers, rules, self._slots, new_cache)
        self.memory = MemoryRelease(
            self.transfer.evictor, self._slots, self.slot_bytes, self.give_up
        )
        self.lines = LinePriorities()
        self.idle_bytes_max = 1 << 62  # of slots that no request uses
        self.idle_work = IdleWork(self, self._slots)
        self.disk: DiskTier | None = None
        if disk_thread is not None:
            self.disk = DiskTier(self.store, layers, self.transfer.evictor, rules, disk_thread)

    # ------------------------------------------------------------ a request's life

    def plan(self, query: PrefixQuery) -> ResumePlan:
        """Return the plan that `open` would carry out now: the last one, while it is good."""
        plan = query.plan
        if plan is None or not self._is_good(plan):
            idle = [slot.view() for slot in self._slots.values() if not slot.is_busy]
            plan = query.plan = make_plan(self.store, idle, query, self.rules.is_exact)
        return plan

    def _is_good(self, plan: ResumePlan) -> bool:
        """Whether a search would find the same: nothing has changed, and its slot is there."""
        is_same = plan.found is not None and plan.found.version is self.store.version
        return is_same and (plan.slot is None or plan.slot in self._slots)

    def open(self, query: PrefixQuery, rows: int) -> tuple[LiveSlot, ResumePlan]:
        """Check out a slot that holds as much of the prompt as is kept; room for `rows` tokens."""
        plan = self.plan(query)
        if plan.slot is None and len(self._slots) >= self.rules.slots_max:
            # What the least needed one held is kept, but not instead of what the prompt goes on
            # from. It may have held the prompt's beginning, and no room was found.
            first, *_ = self.memory.idle()  # not all of them run
            self.memory.free(Reason.SLOTS, slots=[first], spared=self._spared(query))
            plan = self.plan(query)
        self.counts[f"match_{plan.kind}"] += 1
        self.counts["hybrid_trim_miss"] += plan.hybrid_trimmed
        self.counts["vlm_retreat"] += plan.is_retreat
        there = self._slots[plan.slot].line if plan.slot is not None else None
        line = line_of(self.store, self.lines, plan, query, there)
        slot = self.fill(plan, query, line, rows)
        take_over_path(line, plan, query, time.monotonic(), self.rules.ttl_s)
        slot.node.resumed += plan.position > 0
        slot.is_spare = slot.is_settled = False
        # What another prompt's last cut ended is not what this one's prefill would have written.
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
        """Keep what was read to the cut behind `tokens`; `is_fast`: in smaller forwards."""
        start, end = slot.position, len(tokens)
        assert slot.is_busy and start < end, (slot.is_busy, start, end)
        is_canonical = slot.is_canonical and not is_fast
        slot.is_settled |= is_fast
        slot.tokens = tokens
        if is_canonical:
            slot.canonical_cuts.append(end)
        self._check_depth(slot)
        if is_canonical or not self.rules.is_exact:
            self.transfer.index(slot, start, end, name, is_canonical)
        if self.disk is not None:
            self.disk.note_read(slot)
        self.transfer.quantise(slot, end)

    def grow(self, slot: LiveSlot, rows: int) -> None:
        """Before a decode step: make room for `rows` tokens; quantise where that is due."""
        assert slot.is_busy and rows > slot.position, (slot.is_busy, rows, slot.position)
        if rows > slot.capacity:
            slot.capacity = self.layers.reserve(slot.cache, rows)
        if slot.format is None and self.rules.format_at(rows) is not None:
            self.transfer.quantise(slot, rows)
            slot.capacity = self.layers.reserve(slot.cache, rows)
        assert slot.capacity >= rows, (slot.capacity, rows)

    def grow_for_draft(self, slot: LiveSlot, rows: int, draft_rows: int) -> int:
        """Grow for `rows` and a draft's; return how many of these may come: none past packing."""
        self.grow(slot, rows)
        if slot.format is None and self.rules.format_at(rows + draft_rows) is not None:
            return 0
        self.grow(slot, rows + draft_rows)
        return draft_rows

    def limit_growth(self, has_room: Callable[[int], bool]) -> None:
        """Have live caches grow by a quarter only where `has_room` for so many bytes more."""
        self.layers.has_room = has_room

    def release_too(self, images: EncodedImages) -> None:
        """Have encoded images go too where memory is needed."""
        self.memory.images = images

    def lend_bytes(self, slot: LiveSlot) -> int:
        """Return how many bytes more are held once `lend` has copied."""
        tokens = sum(len(extent.tokens) for extent in self.transfer.held_only(slot))
        return min(tokens * self.row_bytes(slot.format), self.store.budget.free_bytes)

    def lend(self, slot: LiveSlot) -> None:
        """Before the slot's cache is merged into a batch: copy out what only it holds."""
        assert slot.is_busy and not slot.lent_extents, "its rows are in a batch"
        slot.lent_extents = slot.held_extents
        self.transfer.give_up_rows(slot, 0)
        slot.cache, slot.capacity = [], 0

    def take_back(self, slot: LiveSlot, cache: list[Any]) -> None:
        """Once a slot's rows are out of a batch: they are in `cache`, and some generated ones."""
        assert slot.is_busy and not slot.cache, "it holds rows of its own"
        slot.cache = cache
        self.transfer.hold_lent_extents(slot)

    def close(self, slot: LiveSlot, cache: list[Any], tokens: Tokens, is_prefilled: bool) -> None:
        """Check the slot in: `cache` holds `tokens`, what was generated included.

        `is_prefilled` says that its prompt was read to the last cut.
        """
        assert slot.is_busy and slot.position <= len(tokens), (slot.position, len(tokens))
        slot.cache, slot.tokens = cache, tokens
        self._check_depth(slot)
        self.transfer.hold_lent_extents(slot)
        if slot.node.is_dropped:
            self.transfer.reindex(slot)
        start = slot.node.position
        assert start <= len(tokens), (start, len(tokens))
        is_whole = not ends_inside(slot.images, len(tokens))  # else nobody resumes there
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
        """Hold kept KV, and slots that no request uses, to so many bytes each from now on."""
        self.store.budget.bytes_max, self.idle_bytes_max = kept_bytes, idle_bytes
        self._give_up_surplus()
        self.transfer.evictor.make_room(0, 0, math.inf, time.monotonic())

    def _give_up_surplus(self) -> None:
        """Empty the slots that no request uses beyond their part, so that kept KV has its own.

        The one that is needed most stays in any case: its conversation goes on without a copy.
        """
        idle = self.memory.idle()
        surplus = sum(map(self.slot_bytes, idle)) - self.idle_bytes_max
        if surplus > 0 and len(idle) > 1:
            self.memory.free(Reason.SLOTS, surplus, slots=idle[:-1])

    def slot_cost(self, query: PrefixQuery, rows: int) -> int:
        """Return how many bytes more are held once the prompt has a slot for `rows` tokens."""
        return self.cost_of(self.plan(query), rows)

    def cost_of(self, plan: ResumePlan, rows: int) -> int:
        """Return how many bytes more are held once a plan's slot has room for `rows` tokens."""
        slot = self._slots[plan.slot] if plan.slot is not None else None
        if slot is not None and slot.capacity >= rows:
            return 0
        held = self.slot_bytes(slot) if slot is not None else 0
        return max(0, self.uncached.cold_bytes(rows) - held)

    def copied_bytes(self, query: PrefixQuery) -> int:
        """Return how many bytes of kept rows nobody needs any more once the prompt's slot has them.

        They go when memory is needed, before all else.
        """
        plan = self.plan(query)
        return self.transfer.copied_bytes(plan) if plan.slot is None else 0

    def releasable(self, query: PrefixQuery | None = None) -> int:
        """Return how many bytes `release` could give up."""
        spared = self._spared(query)
        path = spared.pin.path
        kept = self.store.budget.bytes_used - self.pins.nbytes - spared.pin.nbytes
        kept -= self.transfer.stood_on_bytes(path)
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
        """Give up `nbytes` of what no running request holds, and the prompt `query` needs not.

        What was computed of what goes stays on disk, where there is one.
        """
        self.memory.free(reason, nbytes, spared=self._spared(query))

    def _spared(self, query: PrefixQuery | None) -> Spared:
        """Return what a prompt would resume from now."""
        if query is None:
            return NOTHING
        return Spared.of(self.plan(query), self.store.layout.window)

    # ------------------------------------------------------------ pins

    def pin(self, slot: LiveSlot, pin_id: str, key: str) -> None:
        """Keep what the slot holds, a prompt read to its last cut, until `unpin`.

        It is copied at once: what is pinned does not depend on a slot.

        Raises:
            RequestError: 400, 409 or 503; nothing is pinned, and nothing but room is lost.
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
        self.pins.check(pin_id, key, path, *self.transfer.lacking(slot, path))
        self.pins.add(pin_id, key, path)  # before room is made: none of it goes
        is_whole = slot.node.position == slot.position and self.transfer.complete(slot, path)
        if not is_whole:
            self.pins.drop(pin_id)
            raise Overloaded("There is no room for what is to be pinned now; try again.")
        self.pins.add(pin_id, key, path)  # with what was lacking

    def unpin(self, pin_id: str, key: str) -> bool:
        """Give up a pin of `key`, "" = anyone's; say whether there was one."""
        return self.pins.drop(pin_id, key)

    # ------------------------------------------------------------ the disk

    def recall(
        self, query: PrefixQuery, then: Callable[[Sequence[Record | None]], None]
    ) -> DiskRecall | None:
        """Have the prompt's KV read from disk, and `then` called with it on the disk's thread.

        None where there is nothing to wait for.
        """
        if self.disk is None:
            return None
        recall = self.disk.wanted(query, self.plan(query), self.rules.is_exact)
        return recall if recall is not None and self.disk.thread.read(recall.names, then) else None

    def take_in(self, records: Sequence[Record | None], query: PrefixQuery) -> int:
        """Keep what was read for a prompt; return how many tokens came back."""
        assert self.disk is not None
        line = LinePriority(0, 0.0, 0.0)  # of what did not come
        if records and records[0] is not None:
            line = self.lines.open(time.monotonic(), 1, query.conversation)
            self.lines.end_request(line, time.monotonic())
        found = self.plan(query).found
        assert found is not None, "what was read is of a prompt that was searched"
        tip = max(found.reached, key=lambda node: node.position)
        return self.disk.take_in(records, query, tip, line)

    def disk_report(self) -> dict[str, Any] | None:
        """Return what `/v1/cache` reports of the disk; None where there is none."""
        if self.disk is None:
            return None
        report, counts = self.disk.thread.report(), +self.disk.counts  # those above 0
        return report | {"counts": report["counts"] | dict(counts)}

    def hand_over(self) -> None:
        """Give the disk's thread, at the end, what is not on disk and is gone on from."""
        if self.disk is not None:
            self.disk.write_rest(self._slots.values())

    def shut(self, flush_s: float) -> None:
        """Write what is queued, for so long, and end the disk's thread. Any thread, at the end."""
        if self.disk is not None:
            self.disk.thread.flush(flush_s)
            self.disk.thread.close()

    def _check_in(self, slot: LiveSlot) -> None:
        if self.disk is not None:
            self.disk.end(slot)
        assert slot.is_busy and slot.node.pins > 0, (slot.is_busy, slot.node.pins)
        slot.node.pins -= 1
        slot.is_busy, slot.used_at = False, time.monotonic()
        self.store.changed()  # a prompt may go on in it
        self.lines.end_request(slot.line, slot.used_at)
        self._give_up_surplus()

    # ------------------------------------------------------------ idle time

    def close_spare(self, slot: LiveSlot) -> None:
        if slot.node.is_dropped:
            self.transfer.reindex(slot)
        self._check_in(slot)

    def sweep(self) -> bool:
        """Give up the slots of sessions idle for long; say whether there were any."""
        now, idle_s = time.monotonic(), self.rules.session_idle_s
        old = [s for s in self._slots.values() if not s.is_busy and now - s.used_at > idle_s]
        if self.disk is not None:
            self.disk.write_quiet(self._slots.values())
        if idle_s and old:
            self.memory.free(Reason.SLOTS, slots=old)
        self.lines.forget({extent.line for extent in self.store.extents})
        return bool(old and idle_s)

    # ------------------------------------------------------------ for people

    def clear(self) -> None:
        """Forget everything; what running requests hold comes back when they end.

        What this model has on disk goes too, other workers' included. The memory goes back to the
        system.
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
        """Return what the rows of one token take in `form`."""
        return self.layers.row_cost(form)[0]

    # ------------------------------------------------------------ slots and lines

    def fill(self, plan: ResumePlan, query: PrefixQuery, line: LinePriority, rows: int) -> LiveSlot:
        """Return a busy slot that holds what the plan goes on from."""
        assert plan.position == 0 or self._is_good(plan), "a plan is carried out as it was made"
        self.store.changed()  # no other prompt goes on in its slot
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
        assert slot.root is self.store.root_of(query.root), "keys and adapters share no KV"
        slot.adapter = query.adapter  # of the same bytes; it may have two names
        slot.node.pins += 1
        slot.images = tuple(run.bare() for run in query.images)
        slot.system_end = query.system_end
        self.transfer.quantise(slot, plan.position)
        return slot

    def give_up(self, slot: LiveSlot, kept: Collection[Extent] | None = None) -> None:
        """Empty an idle slot, and copy out what only it holds: of `kept`, None = where it pays."""
        assert not slot.is_busy and self._slots[slot.number] is slot, (slot.number, slot.is_busy)
        if self.disk is not None:
            self.disk.leave(slot)
        self.transfer.give_up_rows(slot, 0, kept)
        slot.cache = []
        del self._slots[slot.number]

    def _check_depth(self, slot: LiveSlot) -> None:
        """Assert that the slot's layers hold as many tokens as its bookkeeping says."""
        depth = self.layers.depth(slot.cache)
        assert depth is None or depth == slot.position, (depth, slot.position)


class NullKVManager:
    """The KV manager that keeps nothing: each request runs in an empty slot of its own.

    With `layers` and `rules` requests compute what they would in `KVManager` from an empty cache:
    slots grow and are packed alike. Without, nobody knows what a slot takes. Also what tests
    compare a warm cache with. Owner: the inference thread.
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
        """The KV manager of requests that are not to be kept."""
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
        """Return what an empty slot for `rows` tokens takes."""
        form = self._rules.format_at(rows)
        return 0 if self._layers is None else self._layers.slot_bytes(rows, form)

    def unwritten_bytes(self, rows: int) -> int:
        """Return what of that the first forward allocates: windows and states."""
        return 0 if self._layers is None else self._layers.unwritten_bytes(rows)

    def releasable(self, query: PrefixQuery | None = None) -> int:
        return self._images.nbytes()

    def release(
        self,
        nbytes: int,
        query: PrefixQuery | None = None,
        reason: Reason = Reason.MEMORY,
    ) -> None:
        if self._images.nbytes():  # a request that waits for memory asks at every step
            self._images.release()

    def recall(self, query: PrefixQuery, then: Callable[[Any], None]) -> None:
        """There is nothing to wait for."""

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
            return 0  # rows are packed from amid the draft on
        self.grow(slot, rows + draft_rows)
        return draft_rows

    def limit_growth(self, has_room: Callable[[int], bool]) -> None:
        """Slots of requests that keep nothing share the layer map, which was told."""

    def release_too(self, images: EncodedImages) -> None:
        self._images = images

    def lend(self, slot: LiveSlot) -> None:
        slot.cache, slot.capacity = [], 0

    def take_back(self, slot: LiveSlot, cache: list[Any]) -> None:
        slot.cache = cache

    def lend_bytes(self, slot: LiveSlot) -> int:
        return 0

    def close(self, slot: LiveSlot, cache: list[Any], tokens: Tokens, is_prefilled: bool) -> None:
        """The slot's memory goes with it."""

    def pin(self, slot: LiveSlot, pin_id: str, key: str) -> None:
        """Raises: RequestError: always."""
        raise RequestError(
            "Nothing can be pinned: this model's KV is not kept. Prompts are read anew each time.",
            code="not_kept",
        )

    def unpin(self, pin_id: str, key: str) -> bool:
        return False

    def hand_over(self) -> None:
        """Nothing is on its way to disk."""

    def shut(self, flush_s: float) -> None:
        """No thread runs."""

    def sweep(self) -> bool:
        return False

    def clear(self) -> None:
        """Nothing is kept."""

    @property
    def slots(self) -> Sequence[LiveSlot]:
        return []

    def _fit(self, slot: LiveSlot, position: int, rows: int) -> None:
        """Pack the slot's rows, where `position` tokens are enough, and make room for `rows`."""
        is_packed_now = self._quantise(slot, position)
        if self._layers is not None and (is_packed_now or rows > slot.capacity):
            slot.capacity = self._layers.reserve(slot.cache, rows)
            assert slot.capacity >= rows, (slot.capacity, rows)

    def _quantise(self, slot: LiveSlot, position: int) -> bool:
        """Pack the slot's rows once there are enough; say whether they were packed now."""
        form = self._rules.format_at(position)
        if form is None or slot.format is not None or self._layers is None:
            return False
        self._layers.quantise(slot.cache, form)
        slot.format = form
        return True
