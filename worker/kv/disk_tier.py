"""Writes committed KV of one model to disk, and brings back what prompts go on from.

What a prompt needs is read before the prompt gets a slot, and goes into the store: planning sees
RAM only. Rows are written at once. To go on behind them, layers that keep states or windows need
these too: a resume point. On a large hybrid it takes as many bytes as the rows of thousands of
tokens, so that it is written where a prompt is likely to go on, and once a conversation has grown
by what it is worth: as many tokens as have rows of as many bytes. What a killed worker loses is no
more than that.
"""

import logging
import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from hearth.shared.suspending_clock import awake_s
from hearth.worker.cache.block_hash import PrefixHash, prefix_hashes
from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.eviction import Evictor
from hearth.worker.cache.extent_store import (
    Extent,
    ExtentStore,
    PrefixNode,
    extents_back,
    path_to,
    within_window,
)
from hearth.worker.cache.pinned_prompts import Pin
from hearth.worker.cache.prefix_search import PrefixQuery, ResumePlan
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import FileKind, FileName, Record
from hearth.worker.kv.kv_transfer import KeepRules, LiveSlot
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.quantise_kv import KVRows, LayerStates, PackedFormat, as_rows
from hearth.worker.kv.serialise_kv import UnreadableRecord, arrays_of

log = logging.getLogger(__name__)

RECALL_S_MAX: Final = 20.0  # from a disk that takes longer nothing is worth waiting for
QUIET_S: Final = 30.0  # a conversation that is silent for so long may be so for hours
COLD_TOKENS: Final = 8_192  # of a long prefill that are read again at most if its worker is killed
EARLY_SHARE: Final = 4  # where other prompts begin alike, 1 / 4 of its worth is enough
ROWLESS_WORTH_TOKENS: Final = 2_048  # of a model that keeps states alone
SHUTDOWN_TOKENS: Final = 64  # fewer are sooner read again than written at the end


@dataclass(frozen=True, slots=True)
class DiskRecall:
    """What a prompt needs from disk: `names`, in an order in which they can be taken in."""

    names: tuple[FileName, ...]
    position: int  # up to which the prompt is kept then
    asked_at: float = field(default_factory=awake_s)

    @property
    def is_late(self) -> bool:
        return awake_s() - self.asked_at > RECALL_S_MAX


@dataclass(frozen=True, slots=True)
class _ReachedPrefix:
    """A prefix of the prompt that is in RAM or on disk, and the files that lead there."""

    position: int
    is_canonical: bool
    node: PrefixNode  # up to which it is in RAM
    path: tuple[FileName, ...] = ()  # rows on disk, from there


class DiskTier:
    """The SSD tier of one model's KV, above the thread that reads and writes files.

    Invariants: what is taken in hangs from a node of the store, and is the prompt's own tokens;
    nothing is written twice, and what the thread refuses is offered again. `_tips` are the ends of
    conversations whose resume points are not on disk, by when their requests ended.
    Owner: the inference thread.
    """

    def __init__(
        self,
        store: ExtentStore,
        layers: LayerMap,
        evictor: Evictor,
        rules: KeepRules,
        disk_thread: DiskThread,
    ) -> None:
        self.thread = disk_thread
        self.counts: Counter[str] = Counter()
        self._store = store
        self._layers = layers
        self._layout = store.layout
        self._evictor = evictor
        self._rules = rules
        self._file_store = disk_thread.file_store
        self._clock = time.monotonic
        self._tips: dict[PrefixNode, float] = {}
        evictor.before_eviction = self.make_way

    # ------------------------------------------------------------ what a prompt needs

    def wanted(self, query: PrefixQuery, plan: ResumePlan, is_exact: bool) -> DiskRecall | None:
        """Return what would have to be read for the prompt to go on further than by its plan.

        None where disk has nothing further. Opens no file.
        """
        assert plan.found is not None, "what is on disk is wanted behind a search"
        by_end = self._reached(query, is_exact, plan.found.reached)
        best = sorted(by_end.values(), key=lambda there: (there.position, there.is_canonical))
        for reached in reversed(best):
            if reached.position <= plan.position:
                return None
            files = self._files_needed(reached, is_exact)
            if files is not None and self._fits(files):
                return DiskRecall(files, reached.position)
        return None

    def _reached(
        self, query: PrefixQuery, is_exact: bool, kept: Mapping[PrefixNode, bool]
    ) -> dict[PrefixHash, _ReachedPrefix]:
        """Return the prefixes of the prompt that are in RAM, and those that disk leads to."""
        todo: dict[PrefixHash, _ReachedPrefix] = {
            node.name: _ReachedPrefix(node.position, is_canonical, node)
            for node, is_canonical in kept.items()
            if node.position <= query.limit
        }
        names = dict(zip(query.cuts, query.names, strict=True))
        following = dict(pairwise([0, *query.cuts]))
        done = dict(todo)
        while todo:
            start, reached = todo.popitem()
            for name in self._file_store.leaving(start):
                end = reached.position + name.token_count
                if name.kind is not FileKind.ROWS or end > query.limit or name.end in done:
                    continue
                if end not in names:
                    root = self._store.root_of(query.root).name
                    (names[end],) = prefix_hashes(root, query.tokens, [end])
                if names[end] != name.end:
                    continue
                if is_exact and following.get(reached.position) != end:
                    continue  # nothing canonical of this prompt ends there
                if is_exact and not name.is_canonical:
                    self.counts["recalls_not_exact"] += 1
                    continue
                is_canonical = reached.is_canonical and name.is_canonical
                there = _ReachedPrefix(end, is_canonical, reached.node, (*reached.path, name))
                done[name.end] = todo[name.end] = there
        return done

    def _files_needed(self, reached: _ReachedPrefix, is_exact: bool) -> tuple[FileName, ...] | None:
        """Return all that is needed to go on there; None where the disk lacks some of it."""
        windows = self._windows(reached)
        if windows is None:
            return None
        files = [*reached.path, *windows]
        if self._layout.has_state and (reached.path or reached.node.snapshot is None):
            run = reached.path[-1] if reached.path else self._rows_file_name(reached.node)
            state = self._file_beside(run, FileKind.STATE, is_exact)
            if state is None:
                return None
            files.append(state)
        return tuple(files)

    def _windows(self, reached: _ReachedPrefix) -> list[FileName] | None:
        """Return the window rows that a resume looks back to and RAM lacks."""
        position, back_to = reached.position, max(0, reached.position - self._layout.window)
        lacking, node = [], reached.node
        for run in reversed(reached.path):
            if position <= back_to:
                break
            lacking.append(run)
            position -= run.token_count
        for extent in within_window(node, node.position - back_to):
            if extent.window is None:
                lacking.append(self._rows_file_name(extent.end))
            elif not extent.window_covers(back_to):
                return None  # nor does what was written when it was made
        found = [self._file_beside(run, FileKind.WINDOW) for run in lacking]
        windows = [name for name in found if name is not None]
        return windows if len(windows) == len(lacking) else None

    def _file_beside(
        self, run: FileName, kind: FileKind, has_to_be_as_good: bool = True
    ) -> FileName | None:
        """Return what is on disk beside the rows of a run, as canonical as they are, if it can be.

        A state in fewer bits is fast beside canonical rows.
        """
        for name in self._file_store.at(run.end):
            is_as_good = name.is_canonical or not (run.is_canonical and has_to_be_as_good)
            if name.kind is kind and name.start == run.start and is_as_good:
                return name
        return None

    def _fits(self, files: Sequence[FileName]) -> bool:
        """Whether the rows may be in RAM at all."""
        rows = [name for name in files if name.kind is FileKind.ROWS]
        row_bytes, buffers = self._layers.row_cost(None)
        budget = self._store.budget
        # A file of packed rows is smaller; a small file counts more than it holds.
        nbytes = sum(
            min(name.token_count * row_bytes, self._file_store.nbytes(name)) for name in rows
        )
        return nbytes <= budget.bytes_max and len(rows) * buffers <= budget.buffers_max

    def _rows_file_name(self, node: PrefixNode) -> FileName:
        """Return the name of the rows that arrive at a node in RAM."""
        arrival = node.arrival
        assert arrival is not None, "nothing is kept at the root"
        return file_name(arrival, FileKind.ROWS, arrival.is_canonical, self._rules.cut_label)

    # ------------------------------------------------------------ from disk

    def take_in(
        self,
        records: Sequence[Record | None],
        query: PrefixQuery,
        tip: PrefixNode,
        line: LinePriority,
    ) -> int:
        """Put what was read into the store; return how many tokens came back.

        `tip` is the last node of the prompt in RAM. Ends at the first record that is missing, does
        not fit the prompt or finds no room: what hangs from it is of no use.
        """
        count = 0
        tips = [tip]
        for record in records:
            if record is None:
                self.counts["recalls_missed"] += 1
                break
            try:
                is_taken = self._take_in(record, query, line, tips)
            except UnreadableRecord as reason:
                self.counts["recalls_unreadable"] += 1
                self.thread.discard(record.name)
                if self.counts["recalls_unreadable"] == 1:
                    log.warning(
                        "a KV file is removed, it cannot be read here: %s. Said once; later ones "
                        "are counted (recalls_unreadable in /v1/cache).",
                        reason,
                    )
                break
            if not is_taken:
                break
            if record.kind is FileKind.ROWS:
                count += len(record.tokens)
                line.tip = record.end  # the prompt goes on with this line
        assert count <= query.limit, (count, query.limit)
        self.counts["recalled_tokens"] += count
        return count

    def _take_in(
        self, record: Record, query: PrefixQuery, line: LinePriority, tips: list[PrefixNode]
    ) -> bool:
        """Put one record into the store; say whether it is there. `tips` are not to be lost."""
        if record.kind is FileKind.ROWS:
            return self._take_in_rows(record, query, line, tips)
        node = self._store.node(record.end)
        arrival = node.arrival if node is not None else None
        if node is None or arrival is None or not self._fits_beside(record, arrival):
            self.counts["recalls_homeless"] += 1
            return False
        if record.kind is FileKind.WINDOW:
            if arrival.window is None:
                window = self._layers.rows_from(record)
                if not self._layers.are_window_rows(window, len(record.tokens)):
                    raise UnreadableRecord("window rows of other shapes than the model's")
                if self._has_room(window.nbytes, window.buffers, tips):
                    rows = window.layers[0].arrays[0].shape[2]
                    self._store.set_window(arrival, window, node.position - rows)
                    arrival.is_window_stored = True
                    node.is_stored = not self._layout.has_state
            return arrival.window is not None
        if node.snapshot is None:
            state = self._layers.state_from(record)
            if not self._layers.is_state(state):
                raise UnreadableRecord("a state of other shapes than the model's")
            if self._has_room(state.nbytes, state.buffers, tips):
                self._store.set_snapshot(node, state, is_fast=not record.is_canonical)
                node.is_stored = True
        return node.snapshot is not None

    def _fits_beside(self, record: Record, arrival: Extent) -> bool:
        """Whether a window or a snapshot is of this very run, and as canonical as it has to be."""
        may_be_fast = record.kind is FileKind.STATE and not self._rules.is_exact
        is_as_good = record.is_canonical or may_be_fast or not arrival.is_canonical
        return arrival.start.name == record.start and is_as_good

    def _take_in_rows(
        self, record: Record, query: PrefixQuery, line: LinePriority, tips: list[PrefixNode]
    ) -> bool:
        start = self._store.node(record.start)
        end = record.position + len(record.tokens)
        if start is None or start.position != record.position:
            self.counts["recalls_homeless"] += 1
            return False
        if not np.array_equal(record.tokens, query.tokens[record.position : end]):
            self.counts["recalls_other_tokens"] += 1
            return False
        tips[1:] = [start]
        rows, packed = self._rows_of(record)
        if not self._has_room(rows.nbytes, rows.buffers, tips):
            return False
        there, extent = self._store.commit(
            start, record.end, record.tokens.copy(), record.is_canonical, line
        )
        assert there.position == end and not there.is_dropped, (there.position, end)
        tips[1:] = [there]
        if extent is not None:  # else as good a one has come meanwhile
            extent.is_stored, extent.is_stored_canonical = True, record.is_canonical
            if self._layers.layout.has_rows:
                self._store.set_body(extent, rows)
        if packed:
            self.counts["recalled_packed_tokens"] += len(record.tokens)
        return True

    def _rows_of(self, record: Record) -> tuple[KVRows, set[PackedFormat | None]]:
        """Return a record's rows, in the format that it names, whatever the settings are now.

        With them comes how they are packed otherwise than live slots have them.

        Raises:
            UnreadableRecord: they are not this model's, or called canonical and packed otherwise.
        """
        rows = self._layers.rows_from(record)
        if not self._layers.are_rows(rows, len(record.tokens)):
            raise UnreadableRecord("rows of other shapes than the model's")
        packed = rows.formats - {None, self._rules.running_format}
        if packed and record.is_canonical:
            raise UnreadableRecord(f"rows in {packed} that call themselves canonical")
        return rows, packed

    def _has_room(self, nbytes: int, buffers: int, tips: Sequence[PrefixNode]) -> bool:
        """Make room for what was read, so that nothing of `tips`' paths goes; say whether it fits.

        It is needed now; what makes way for it is on disk, or is less likely needed than that.
        """
        path = Pin.of("", tuple({extent: None for tip in tips for extent in path_to(tip)}))
        path.mark(1)
        has_room = self._evictor.make_room(nbytes, buffers, math.inf, time.monotonic())
        path.mark(-1)
        if not has_room:
            self.counts["recalls_refused"] += 1
        return has_room

    # ------------------------------------------------------------ a request's life

    def begin(self, slot: LiveSlot, query: PrefixQuery) -> None:
        """A prompt goes on from what the slot holds: that is nobody's end any more.

        Where others went on before, prompts part: one may come back to it.
        """
        slot.system_end, slot.cuts = query.system_end, query.cuts
        node = slot.node
        if node.leaving and self._is_worth(node, EARLY_SHARE):
            self._write_point(node, slot if slot.position == node.position else None)
        for passed in (node, *(extent.start for extent in extents_back(node))):
            self._tips.pop(passed, None)

    def note_read(self, slot: LiveSlot) -> None:
        """A prefill has come to the slot's node."""
        self.write_slot(slot)
        node = slot.node
        if self._layout.resumes_anywhere or node.is_stored or node.position != slot.position:
            return
        if node.position == slot.system_end:
            if self._is_worth(node, EARLY_SHARE):
                self._write_point(node, slot)
            return
        number = bisect_right(slot.cuts, node.position)
        if is_amid := number < len(slot.cuts):
            # Two cuts further the next one could be on disk: it is written amid a forward.
            later = slot.cuts[min(number + 1, len(slot.cuts) - 1)]
            is_due = self._tail_tokens(node) + later - node.position > COLD_TOKENS
        else:
            is_due = self._is_worth(node)
        if is_due and not self._file_store.is_reserved and self._write_point(node, slot):
            self._drop_former(slot)
            slot.cold_point = node if is_amid else None

    def end(self, slot: LiveSlot) -> None:
        """The slot's request ended, however it did."""
        self.write_slot(slot)
        slot.cold_point = None
        if self._layout.resumes_anywhere:
            return
        for node in self._ends_of(slot):
            there = slot if node.position == slot.position else None
            is_due = self._is_worth(node) and not self._file_store.is_reserved
            if not (is_due and self._write_point(node, there, is_needed=True)):
                self._tips[node] = self._clock()

    def leave(self, slot: LiveSlot) -> None:
        """The slot is about to be emptied: write now what only it has."""
        if slot.node in self._tips and slot.position == slot.node.position:
            self._write_tip(slot.node, slot, EARLY_SHARE)

    def make_way(self, extent: Extent) -> None:
        """Something of an extent is about to leave memory: write what conversations need of it."""
        for node in list(self._tips):
            if extent is node.arrival or extent in within_window(node, self._layout.window):
                self._write_tip(node, None, EARLY_SHARE)

    def write_quiet(self, slots: Iterable[LiveSlot]) -> None:
        """Write the resume points of conversations that have been silent for a while."""
        until = self._clock() - QUIET_S
        quiet = [node for node, ended_at in self._tips.items() if ended_at <= until]
        there = {slot.node: slot for slot in slots if not slot.is_busy} if quiet else {}
        for node in quiet:
            self._write_tip(node, there.get(node), EARLY_SHARE)

    def write_rest(self, slots: Collection[LiveSlot]) -> None:
        """Hand over, at the end, all that is not on disk and that a conversation goes on from."""
        self.thread.lift_limit()
        if self.thread.has_lost:
            for extent in self._store.extents:  # what is on disk is not written again
                extent.is_stored = extent.is_window_stored = False
            for node in self._store.nodes:
                node.is_stored = False
        for slot in slots:
            self.write_slot(slot)
        for extent in list(self._store.extents):
            if not extent.is_stored and (extent.body is not None or not self._layout.has_rows):
                self.write(extent, None)
        for slot in slots:
            if slot.is_busy and not slot.node.is_dropped and slot.node.arrival is not None:
                self._tips.setdefault(slot.node, self._clock())
        there = {
            slot.node: slot
            for slot in slots
            if slot.position == slot.node.position
            and (not slot.is_busy or self._layers.depth(slot.cache) == slot.position)
        }  # that hold their node's tokens and no more: nobody decodes in them
        newest_first = sorted(self._tips, key=lambda node: -self._tips[node])
        for node in newest_first:
            self._write_tip(node, there.get(node), None)

    def _ends_of(self, slot: LiveSlot) -> list[PrefixNode]:
        """Return where a conversation may go on: its prompt's end, and its answer's, in order.

        Its next prompt may leave out of the answer what the model thought.
        """
        found = [self._store.tip_of(slot.line), slot.node]
        return [
            node
            for number, node in enumerate(found)
            if node is not None
            and node.arrival is not None
            and not node.is_stored
            and node not in found[:number]
        ]

    # ------------------------------------------------------------ resume points

    def _tail_tokens(self, node: PrefixNode) -> int:
        """Return how many tokens before `node` the last resume point on disk lies."""
        position = node.position
        while node.arrival is not None and not node.is_stored:
            node = node.arrival.start
        return position - node.position

    def _is_worth(self, node: PrefixNode, share: int = 1) -> bool:
        """Whether the tokens since the last point have rows of as many bytes as one here takes.

        Or of 1 / `share` of that.
        """
        if self._layout.resumes_anywhere or node.is_stored or node.arrival is None:
            return False
        row_bytes = self._layers.row_bytes
        worth = self._point_bytes(node) // row_bytes if row_bytes else ROWLESS_WORTH_TOKENS
        return self._tail_tokens(node) * share >= worth

    def _point_bytes(self, node: PrefixNode) -> int:
        """Return what is written for a resume point."""
        back_to, runs = node.position - self._layout.window, self._lacking_windows(node)
        tokens = sum(run.end.position - max(run.start.position, back_to) for run in runs)
        return self._layers.window_bytes(tokens) + self._layers.state_bytes

    def _lacking_windows(self, node: PrefixNode) -> list[Extent]:
        """Return the runs within the window before `node` whose window rows are not on disk."""
        near = within_window(node, self._layout.window)
        return [extent for extent in near if not extent.is_window_stored]

    def _write_tip(self, node: PrefixNode, slot: LiveSlot | None, share: int | None) -> None:
        """Write the point at a conversation's end where that is worth it; None = at the end.

        What is not worth it yet may be at the end.
        """
        if node.is_dropped or node.is_stored:
            del self._tips[node]
            return
        is_long = self._tail_tokens(node) >= SHUTDOWN_TOKENS
        is_worth = is_long if share is None else self._is_worth(node, share)
        if is_worth and self._write_point(node, slot, is_needed=True):
            del self._tips[node]

    def _write_point(
        self, node: PrefixNode, slot: LiveSlot | None, is_needed: bool = False
    ) -> bool:
        """Hand over what it takes to resume at `node`, from RAM or a slot that ends there.

        Say whether nothing of it waits to be offered again. Where some of it is in memory no more,
        there is none.
        """
        arrival = node.arrival
        assert arrival is not None, "nothing is kept at the root"
        is_allowed = is_needed or not self._file_store.is_reserved
        if not (is_allowed and arrival.is_stored):
            return False
        lacking = self._lacking_windows(node)
        windows = [(extent, self._window(extent, node, slot)) for extent in lacking]
        state = self._state(node, slot) if self._layout.has_state else LayerStates(())
        if state is None or any(window is None for _, window in windows):
            self.counts["points_missed"] += 1
            return True
        for extent, window in windows:
            assert window is not None
            extent.is_window_stored = self._hand_over(extent, FileKind.WINDOW, window, is_needed)
            if not extent.is_window_stored:
                return False
        node.is_stored = not state.layers or self._hand_over(
            arrival, FileKind.STATE, state, is_needed
        )
        self.counts["points_written"] += node.is_stored
        return node.is_stored

    def _hand_over(
        self, extent: Extent, kind: FileKind, kept: KVRows | LayerStates, is_needed: bool
    ) -> bool:
        """Have the disk's thread write a record of an extent; say whether it is there or taken."""
        name = self._file_name(extent, kind)
        if self.thread.holds(name):
            return True
        record = Record(
            root=self._store.root.name,
            start=extent.start.name,
            end=extent.end.name,
            position=extent.start.position,
            tokens=extent.tokens,
            is_canonical=name.is_canonical,
            kind=kind,
            arrays=arrays_of(kept),
            rule=name.rule,
            source=kept,
        )
        return self.thread.write(record, is_needed)

    def _file_name(self, extent: Extent, kind: FileKind) -> FileName:
        is_fast = kind is FileKind.STATE and extent.end.is_snapshot_fast
        is_canonical = extent.is_stored_canonical and not is_fast
        return file_name(extent, kind, is_canonical, self._rules.cut_label)

    def _window(self, extent: Extent, node: PrefixNode, slot: LiveSlot | None) -> KVRows | None:
        """Return an extent's window rows as far as `node` looks back; None: they are gone."""
        back_to = max(0, node.position - self._layout.window)
        if extent.window_covers(back_to):
            return as_rows(extent.window)
        start = max(extent.start.position, back_to)
        if slot is None or self._layers.window_held(slot.cache) < node.position - start:
            return None
        behind = node.position - extent.end.position
        return self._layers.copy_window(slot.cache, node.position - start, behind)

    def _state(self, node: PrefixNode, slot: LiveSlot | None) -> LayerStates | None:
        if node.snapshot is not None:
            assert isinstance(node.snapshot, LayerStates)
            return node.snapshot
        return None if slot is None else self._layers.take_state(slot.cache)

    def _drop_former(self, slot: LiveSlot) -> None:
        """Remove the point amid the slot's prefill that the next one has replaced."""
        node, slot.cold_point = slot.cold_point, None
        if node is None or node.is_dropped or len(node.leaving) != 1 or node.resumed:
            return
        node.is_stored = False
        needed = within_window(slot.node, self._layout.window)
        extents = [
            extent for extent in within_window(node, self._layout.window) if extent not in needed
        ]
        for extent in extents:
            extent.is_window_stored = False
        names = [self._file_name(extent, FileKind.WINDOW) for extent in extents]
        if self._layout.has_state and node.arrival is not None:
            names.append(self._file_name(node.arrival, FileKind.STATE))
        self.thread.drop(names)

    # ------------------------------------------------------------ rows

    def write_slot(self, slot: LiveSlot) -> None:
        """Hand over what of the slot's rows is not on disk; what is refused waits.

        Copies rows that only the slot holds: those of one chunk, in most cases.
        """
        for extent in slot.held_extents:
            if not extent.is_stored and extent in self._store:
                self.write(extent, slot)  # a short one may fit where a long one does not

    def write(self, extent: Extent, slot: LiveSlot | None) -> bool:
        """Hand over an extent's rows, which are its own or `slot`'s; say whether that was taken.

        Nothing is copied that the disk's thread would refuse.
        """
        form = None
        if extent.body is None and slot is not None and self._layout.has_rows:
            # What is packed is fast, all its files alike: a snapshot beside it that counted as
            # canonical could be taken for that of other cuts, once a canonical run replaces it.
            form = self._rules.packing(slot, extent.end.position)
        is_own = form is None and self._hangs_from_its_own(extent)
        extent.is_stored_canonical = extent.is_canonical and is_own
        is_there = self.thread.holds(self._file_name(extent, FileKind.ROWS))
        if not is_there and not self.thread.accepts(self._rows_bytes(extent, slot, form)):
            return False
        rows = KVRows(())
        if extent.body is not None:
            rows = as_rows(extent.body)
        elif self._layout.has_rows:
            assert slot is not None, "rows that the store does not hold are a slot's"
            start, end = extent.start.position, extent.end.position
            assert end <= slot.position, (end, slot.position)
            rows = self._layers.copy_rows(slot.cache, start, end, form)
        is_needed = not extent.line.is_side
        extent.is_stored = self._hand_over(extent, FileKind.ROWS, rows, is_needed)
        return extent.is_stored

    def _rows_bytes(self, extent: Extent, slot: LiveSlot | None, form: PackedFormat | None) -> int:
        """Return what an extent's rows take in a file."""
        if extent.body is not None:
            return extent.body.nbytes
        live = slot.format if slot is not None else None
        return len(extent.tokens) * self._layers.row_cost(form or live)[0]

    def _hangs_from_its_own(self, extent: Extent) -> bool:
        """Whether the run on disk that arrives where this one starts was cut as this one's was.

        Another worker may have reached that prefix by other cuts; what hangs from it there is not
        what a prefill would have written.
        """
        before = extent.start.arrival
        if before is None:
            return True
        there = self._file_store.at(extent.start.name)
        canonical = [name for name in there if name.kind is FileKind.ROWS and name.is_canonical]
        return all(name.start == before.start.name for name in canonical)


def file_name(extent: Extent, kind: FileKind, is_canonical: bool, cut_label: str) -> FileName:
    """Return the name of an extent's record of one kind."""
    ends, count = (extent.start.name, extent.end.name), len(extent.tokens)
    return FileName(kind, *ends, count, is_canonical, cut_label if is_canonical else "")
