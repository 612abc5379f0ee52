"""Copies KV between live slots and the extent store, and keeps the store's bookkeeping right.

Live slots are the contiguous caches that sequences run in.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby, pairwise, takewhile
from typing import Any

import mlx.core as mx
import numpy as np

from hearth.worker.cache.block_hash import PrefixHash, Tokens, prefix_hashes
from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.eviction import Evictor
from hearth.worker.cache.extent_store import (
    Extent,
    ExtentStore,
    KVArrays,
    PrefixNode,
    path_to,
    within_window,
)
from hearth.worker.cache.image_keys import ImageRun
from hearth.worker.cache.prefix_search import ResumePlan, SlotView
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.quantise_kv import LayerRows, LayerStates, PackedFormat, QuantFormat, as_rows


@dataclass(eq=False, slots=True)
class LiveSlot:
    """One live cache.

    Invariants: the layers hold exactly `tokens`; this slot holds the rows of `held_extents`, which
    lie along `tokens`; the slot's KV is canonical up to `canonical_to`.
    Owner: the inference thread.
    """

    number: int
    cache: list[Any]  # empty while the slot has no rows, or while the rows are in a batch
    node: PrefixNode  # the longest prefix of `tokens` in the store; a root at first
    line: LinePriority
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    images: tuple[ImageRun, ...] = ()  # images of the request's prompt, without the files
    canonical_cuts: list[int] = field(default_factory=list)  # cuts of the canonical prefill
    held_extents: list[Extent] = field(default_factory=list)
    lent_extents: list[Extent] = field(default_factory=list)  # extents held before joining a batch
    floor: int = 0  # lowest position to which the slot can be rewound
    is_busy: bool = True
    is_spare: bool = False  # filled by idle work: released before the slots of sessions
    is_idle_work_done: bool = False  # idle work has nothing left to do for this slot
    idle_prefilled_to: int = 0  # end of the tokens that idle time has prefilled once
    capacity: int = 0  # tokens that fit without a copy
    format: QuantFormat | None = None  # format of the rows
    adapter: str = ""  # adapter that the rows were computed with; "" = none
    used_at: float = 0.0
    system_end: int = 0  # end of system and tools in the request's prompt
    cuts: Sequence[int] = ()  # cuts of the request's prompt; the last cut is at the prompt's end
    cold_point: PrefixNode | None = None  # resume point of a long prefill, in case of a crash
    root: PrefixNode = field(init=False)  # the node of the empty prefix

    def __post_init__(self) -> None:
        self.root = self.node

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def canonical_to(self) -> int:
        return self.canonical_cuts[-1] if self.canonical_cuts else 0

    @property
    def is_canonical(self) -> bool:
        """Whether a prefill of the slot's tokens would have written exactly the same KV."""
        return self.position == self.canonical_to

    def view(self) -> SlotView:
        cuts = tuple(self.canonical_cuts)
        return SlotView(self.number, self.tokens, cuts, self.floor, self.root.name)


class IdleMode(Enum):
    """What is prefilled in idle time."""

    NEVER = "never"
    AUTO = "auto"  # tokens that the next request would prefill, and trunks whose KV is fast


@dataclass(frozen=True, slots=True)
class KeepRules:
    """The rules by which KV is kept: settings, within the limits of the model."""

    slots_max: int
    chunk: int  # tokens of one prefill forward
    is_exact: bool  # canonical KV only: warm equals cold to the bit
    cut_label: str = ""  # label of the prefill's cut rule in file names
    ttl_s: float = 0.0  # KV unused for longer is evicted first, and in idle time; 0 = no limit
    session_idle_s: float = 0.0  # a slot unused for longer is released; 0 = never
    store_format: PackedFormat | None = None  # format of rows in the store and on disk
    store_from: int = 256  # least tokens of a prefix that is stored packed
    store_ignored: str = ""  # why rows are stored unpacked although the settings ask for bits
    running_format: QuantFormat | None = None  # format of the rows of a long live slot
    running_from: int = 0  # least tokens of a live slot in `running_format`
    idle_prefill: IdleMode = IdleMode.AUTO
    api_keys: int = 1  # number of API keys in the settings, which share the room for pins

    def format_at(self, tokens: int) -> QuantFormat | None:
        """Return the format of the rows of a live slot with `tokens` tokens; None = raw."""
        return self.running_format if tokens >= self.running_from else None

    def packing(self, slot: LiveSlot, end: int) -> PackedFormat | None:
        """Return the format for storing the slot's rows up to `end`; None = the slot's own."""
        is_kept_raw = slot.format is not None or end < self.store_from
        return None if is_kept_raw else self.store_format


class KVTransfer:
    """Copies KV out of slots and back into slots.

    Invariant: rows that only one slot holds are copied into the store before the slot loses them;
    without room for the rows, the extent is forgotten and counted.
    Owner: the inference thread.
    """

    def __init__(
        self,
        store: ExtentStore,
        layers: LayerMap,
        rules: KeepRules,
        slots: dict[int, LiveSlot],
        new_cache: Callable[[], list[Any]],
    ) -> None:
        self.store = store
        self.evictor = Evictor(store, rules.chunk, rules.ttl_s)
        self.counts: Counter[str] = Counter(hybrid_trim_miss=0, vlm_retreat=0)
        self._layers = layers
        self.rules = rules
        self._slots = slots
        self._new_cache = new_cache

    # ------------------------------------------------------------ into the store

    def index(
        self, slot: LiveSlot, start: int, end: int, name: PrefixHash, is_canonical: bool
    ) -> None:
        """Make the slot's tokens [start, end) findable; the slot holds the rows of these tokens.

        If the slot ends at `end`, windows and states are copied before the next forward overwrites
        them.
        """
        if slot.node.is_dropped:
            self.counts["commits_detached"] += 1
            return
        assert slot.node.position == start, (slot.node.position, start)
        assert start < end <= slot.position, (start, end, slot.position)
        tokens = slot.tokens[start:end].copy()
        node, extent = self.store.commit(slot.node, name, tokens, is_canonical, slot.line)
        node.is_in_head |= end <= slot.system_end
        node.is_left_out = False  # this prompt contains the node
        if extent is None and node.arrival is not None:
            # The kept extent is as good. The slot holds the same rows if both were made alike.
            arrival = node.arrival
            is_same = arrival.is_canonical == is_canonical and arrival.start is slot.node
            extent = arrival if is_same else None
        if extent is not None and slot.number not in extent.holders:
            extent.holders.add(slot.number)
            slot.held_extents.append(extent)
        if slot.is_busy:
            assert slot.node.pins > 0, slot.node
            slot.node.pins -= 1
            node.pins += 1
        slot.node = node
        if extent is not None and end == slot.position:
            self._keep_window(slot, extent)
            self._keep_state(slot, node)

    def _keep_window(self, slot: LiveSlot, extent: Extent) -> None:
        """Keep the window rows that a resume at the extent's end needs."""
        window = self._layers.layout.window
        if not window or extent.window is not None:
            return
        count = min(len(extent.tokens), window, self._layers.window_held(slot.cache))
        nbytes = self._layers.window_bytes(count)
        if count and self.has_room_at(extent.end, nbytes, self._layers.window_buffers):
            rows = self._layers.copy_window(slot.cache, count)
            self.store.set_window(extent, rows, extent.end.position - count)

    def _keep_state(self, slot: LiveSlot, node: PrefixNode) -> None:
        is_better = node.is_snapshot_fast and slot.is_canonical
        if not self._layers.layout.has_state or (node.snapshot is not None and not is_better):
            return
        if self.has_room_at(node, self._layers.state_bytes, self._layers.state_buffers):
            state = self._layers.take_state(slot.cache)
            self.store.set_snapshot(node, state)

    def has_room_at(self, node: PrefixNode, nbytes: int, buffers: int) -> bool:
        """Make room for a window or a snapshot at `node`; return whether there is room now."""
        now = time.monotonic()
        if self._make_room(nbytes, buffers, self.evictor.resume_worth(node, nbytes, now), now):
            return True
        self.counts["commits_refused"] += 1
        return False

    def _make_room(self, nbytes: int, buffers: int, worth: float, now: float) -> bool:
        before = self.evictor.evictions
        has_room = self.evictor.make_room(nbytes, buffers, worth, now)
        if self.evictor.evictions > before:
            mx.clear_cache()  # returns the evicted memory to the system
        return has_room

    def release_rows(
        self, slot: LiveSlot, position: int, kept: Collection[Extent] | None = None
    ) -> None:
        """Release the slot's extents after `position`; copy out rows that no other slot holds.

        With `kept`, only these extents are copied, at any cost; None = each extent that is worth
        its room.
        """
        now = time.monotonic()
        if kept is not None:
            for extent in self.unshared_extents(slot, kept):
                self._copy_out(extent, slot, math.inf, now)
        lost = [e for e in slot.held_extents if e.end.position > position and e in self.store]
        likelihoods = self.evictor.likelihoods_from(lost[0], now) if lost else {}
        for extent in lost:
            if kept is None and extent.body is None and extent.holders == {slot.number}:
                self._copy_out(extent, slot, likelihoods.get(extent, 1.0), now)
            self.store.remove_holder(extent, slot.number)
        slot.held_extents = [
            extent for extent in slot.held_extents if extent.end.position <= position
        ]

    def in_use_bytes(self, spared: Sequence[Extent]) -> int:
        """Return the bytes of kept rows on running requests' paths, without rows in slots.

        Rows of `spared` and of pinned extents are left out: the caller counts those rows.
        """
        busy = (slot.node for slot in self._slots.values() if slot.is_busy)
        bodies = {e: e.body for node in busy for e in path_to(node) if not (e.holders or e.pinned)}
        kept = (body for extent, body in bodies.items() if extent not in spared)
        return sum(body.nbytes for body in kept if body is not None)

    def unshared_extents(
        self, slot: LiveSlot, path: Collection[Extent] | None = None
    ) -> list[Extent]:
        """Return the extents of `path` with rows in this slot alone; None = of all held extents."""
        extents = slot.held_extents if path is None else path
        candidates = extents if self._layers.layout.has_rows else ()
        return [e for e in candidates if e.body is None and e.holders == {slot.number}]

    def _copy_out(self, extent: Extent, slot: LiveSlot, likelihood: float, now: float) -> None:
        if not self._layers.layout.has_rows:
            return
        form = self.rules.packing(slot, extent.end.position)
        row_bytes, buffers = self._layers.row_cost(slot.format or form)
        nbytes = len(extent.tokens) * row_bytes
        if not self._make_room(nbytes, buffers, likelihood / row_bytes, now):
            self.counts["cut_outs_refused"] += 1
            return
        start, end = extent.start.position, extent.end.position
        assert end <= slot.position, (end, slot.position)
        body = self._layers.copy_rows(slot.cache, start, end, form)
        if body.formats - {None, slot.format}:
            self.store.make_fast(extent)
        self.store.set_body(extent, body)
        self.counts["cut_out_bytes"] += body.nbytes

    def hold_lent_extents(self, slot: LiveSlot) -> None:
        """Mark the slot as a holder again after its rows came back from a batch, unchanged."""
        for extent in slot.lent_extents:
            assert extent.end.position <= slot.position, (extent.end.position, slot.position)
            if extent in self.store:
                extent.holders.add(slot.number)
                slot.held_extents.append(extent)
        slot.lent_extents = []

    def reindex(self, slot: LiveSlot) -> None:
        """Make a slot findable again after its extents were dropped from the store."""
        slot.held_extents = [extent for extent in slot.held_extents if extent in self.store]
        slot.node = slot.root
        slot.node.pins += slot.is_busy
        first_cut = slot.canonical_cuts[0] if slot.canonical_cuts else 0
        if slot.format is not None and first_cut and self.rules.format_at(first_cut) is None:
            slot.canonical_cuts = []  # a shorter cold run would have raw rows, not packed rows
        names = prefix_hashes(slot.root.name, slot.tokens, slot.canonical_cuts)
        pieces = pairwise([0, *slot.canonical_cuts])
        for (start, end), name in zip(pieces, names, strict=True):
            self.index(slot, start, end, name, is_canonical=True)

    # ------------------------------------------------------------ pins

    def lacking(self, slot: LiveSlot, path: Sequence[Extent]) -> tuple[int, int]:
        """Return the bytes and the number of buffers that `complete` would copy."""
        rows, windows = self._slot_only(path), self._missing_windows(slot, path)
        costs = [self._layers.row_cost(self._slots[min(e.holders)].format) for e in rows]
        nbytes = sum(len(e.tokens) * cost for e, (cost, _) in zip(rows, costs, strict=True))
        nbytes += self._layers.window_bytes(sum(e.end.position - start for e, start in windows))
        buffers = sum(arrays for _, arrays in costs) + len(windows) * self._layers.window_buffers
        if self._layers.layout.has_state and path[-1].end.snapshot is None:
            nbytes += self._layers.state_bytes
            buffers += self._layers.state_buffers
        return nbytes, buffers

    def complete(self, slot: LiveSlot, path: Sequence[Extent]) -> bool:
        """Copy all KV that a resume at the path's end needs and that only slots hold.

        The path must end at the slot's position. Without room, copy nothing and return False.
        Rows keep the slot's format: pinned KV is not stored in fewer bits.
        """
        assert path[-1].end.position == slot.position, (path[-1].end.position, slot.position)
        if not self._make_room(*self.lacking(slot, path), math.inf, time.monotonic()):
            return False
        for extent in self._slot_only(path):
            start, end = extent.start.position, extent.end.position
            cache = self._slots[min(extent.holders)].cache
            self.store.set_body(extent, self._layers.copy_rows(cache, start, end, None))
        for extent, start in self._missing_windows(slot, path):
            end = extent.end.position
            rows = self._layers.copy_window(slot.cache, slot.position - start, slot.position - end)
            self.store.set_window(extent, rows, start)
        if self._layers.layout.has_state and path[-1].end.snapshot is None:
            self.store.set_snapshot(path[-1].end, self._layers.take_state(slot.cache))
        return True

    def _slot_only(self, path: Sequence[Extent]) -> list[Extent]:
        """Return the extents of `path` whose rows are in live slots only."""
        return [e for e in path if e.body is None] if self._layers.layout.has_rows else []

    def _missing_windows(self, slot: LiveSlot, path: Sequence[Extent]) -> list[tuple[Extent, int]]:
        """Return (extent, start) of all window rows that the path's last window lacks."""
        back_to, end = slot.position - self._layers.layout.window, path[-1].end
        near = reversed(within_window(end, end.position - back_to))
        lacking = (extent for extent in near if not extent.window_covers(back_to))
        return [(extent, max(extent.start.position, back_to)) for extent in lacking]

    # ------------------------------------------------------------ into a slot

    def rewind(self, slot: LiveSlot, plan: ResumePlan) -> None:
        """Rewind a slot to the plan's position."""
        assert slot.floor <= plan.position <= slot.position, (slot.floor, plan.position)
        if plan.position == slot.position:
            return
        # Read first, because copying rows out may evict windows and states:
        windows, state = self._window_runs(plan), plan.path[-1].end.snapshot
        self.release_rows(slot, plan.position)
        self._layers.trim(slot.cache, plan.position)
        self._put_windows_and_states(slot, plan, windows, state)
        slot.canonical_cuts = [cut for cut in slot.canonical_cuts if cut <= _canonical_to_max(plan)]
        slot.idle_prefilled_to = min(slot.idle_prefilled_to, plan.position)
        self._set_position(slot, plan)

    def restore(self, slot: LiveSlot, plan: ResumePlan, rows: int) -> None:
        """Fill an empty slot with the kept KV up to the plan's position."""
        assert slot.position == 0 and not slot.held_extents, (slot.number, slot.position)
        slot.cache = self._new_cache()
        if plan.position == 0:
            return
        form = self.rules.format_at(plan.position)
        if form is not None:
            self._layers.quantise(slot.cache, form)
            slot.format, slot.floor = form, plan.position
        if self._layers.layout.has_rows:
            self._layers.put_rows(slot.cache, self._row_runs(plan), plan.position, rows)
            for extent in plan.path:
                if extent.end.position <= plan.position and self._is_in(extent, slot.format):
                    extent.holders.add(slot.number)
                    slot.held_extents.append(extent)
        state = plan.path[-1].end.snapshot
        self._put_windows_and_states(slot, plan, self._window_runs(plan), state)
        self.counts["restored_tokens"] += plan.position
        limit = _canonical_to_max(plan)
        canonical = takewhile(lambda e: e.is_canonical and e.end.position <= limit, plan.path)
        slot.canonical_cuts = [extent.end.position for extent in canonical]
        self._set_position(slot, plan)

    def copied_bytes(self, plan: ResumePlan) -> int:
        """Return the bytes of the kept rows that `plan` would copy into a slot."""
        form = self.rules.format_at(plan.position)
        inside = [e for e in plan.path if e.end.position <= plan.position and not e.pinned]
        return sum(e.body.nbytes for e in inside if e.body is not None and self._is_in(e, form))

    def _set_position(self, slot: LiveSlot, plan: ResumePlan) -> None:
        """Set the slot's tokens and node. A plan that ends within an extent makes a new node."""
        assert plan.path[0].start is slot.root, "the path begins at another root"
        tokens = np.concatenate([extent.tokens for extent in plan.path])
        slot.tokens = tokens[: plan.position]
        assert slot.position == plan.position, (slot.position, plan.position)
        last = plan.path[-1]
        if last.end.position == plan.position:
            slot.node = last.end
            return
        slot.node = last.start
        slot.node.pins += slot.is_busy
        (name,) = prefix_hashes(slot.root.name, slot.tokens, [plan.position])
        self.index(slot, last.start.position, plan.position, name, is_canonical=False)
        slot.node.pins -= slot.is_busy

    def _row_runs(self, plan: ResumePlan) -> list[tuple[LayerRows, ...]]:
        """Return the rows along the path in few pieces: one for each run of extents in one slot.

        Some pieces are views of other slots' rows, and must be read before those slots write.
        """
        row_runs = []
        for number, group in groupby(
            plan.path, lambda e: min(e.holders) if e.body is None else None
        ):
            extents = list(group)
            if number is not None:
                start, end = extents[0].start.position, extents[-1].end.position
                cache = self._slots[number].cache
                row_runs.append(self._layers.rows(cache, start, min(end, plan.position)))
                continue
            for extent in extents:
                start, end = extent.start.position, min(extent.end.position, plan.position)
                row_runs.append(self._layers.kept_rows(as_rows(extent.body), start, end))
        return row_runs

    def _is_in(self, extent: Extent, form: QuantFormat | None) -> bool:
        """Whether an extent's rows are in `form`, and so equal those of a slot in this format."""
        if extent.body is None:
            return self._slots[min(extent.holders)].format == form
        formats = as_rows(extent.body).formats
        return form in formats and formats <= {None, form}

    def _window_runs(self, plan: ResumePlan) -> list[tuple[LayerRows, ...]]:
        """Return the window layers' rows before the plan's position, in order."""
        window = self._layers.layout.window
        back_to = max(0, plan.position - window)
        row_runs = []
        for extent in plan.path if window else ():
            if extent.end.position > back_to:
                assert extent.window is not None, "the plan's path lacks window rows"
                row_runs.append(self._layers.kept_rows(as_rows(extent.window)))
        return row_runs

    def _put_windows_and_states(
        self,
        slot: LiveSlot,
        plan: ResumePlan,
        windows: list[tuple[LayerRows, ...]],
        state: KVArrays | None,
    ) -> None:
        layout = self._layers.layout
        if layout.window:
            self._layers.put_window(slot.cache, windows, plan.position)
        if layout.has_state:
            assert isinstance(state, LayerStates), "the plan's path ends without a snapshot"
            self._layers.put_state(slot.cache, state, plan.position)

    def quantise(self, slot: LiveSlot, position: int) -> None:
        """Quantise a live slot's rows once there are enough; copy out the raw rows first."""
        form = self.rules.format_at(position)
        if form is None or slot.format is not None:
            return
        self.release_rows(slot, 0)
        self._layers.quantise(slot.cache, form)
        slot.format, slot.floor = form, position


def _canonical_to_max(plan: ResumePlan) -> int:
    """Return the last position that can be a canonical cut; no cut with a fast state can be."""
    end = plan.path[-1].end
    return plan.position - (end.position == plan.position and end.is_snapshot_fast)
