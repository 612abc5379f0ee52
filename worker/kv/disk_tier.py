"""Writes committed KV of one model to disk, and reads back the KV that prompts resume from.

A prompt's KV is read into the store before the prompt gets a slot, because plans are made from RAM
alone. Rows are written at once. To resume after rows, a model with states or windows also needs a
resume point: the snapshot and the window rows at one node. In a large hybrid a resume point takes
as many bytes as the rows of thousands of tokens. A resume point is therefore written only where a
prompt is likely to resume, and only once the rows since the last point take as many bytes. A killed
worker loses no more prefill than these rows.
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

RECALL_S_MAX: Final = 20.0  # limit of the time that a request waits for the disk
QUIET_S: Final = 30.0  # a conversation that is silent for this long may be silent for hours
COLD_TOKENS: Final = 8_192  # most tokens of a long prefill that a killed worker loses
EARLY_SHARE: Final = 4  # where prompts may branch, a resume point needs only 1 / 4 of the worth
ROWLESS_WORTH_TOKENS: Final = 2_048  # worth of a resume point in a model with states only
SHUTDOWN_TOKENS: Final = 64  # fewest tokens that are worth a resume point at shutdown


@dataclass(frozen=True, slots=True)
class DiskRecall:
    """The records that a prompt needs from disk, in the order of insertion into the store."""

    names: tuple[FileName, ...]
    position: int  # position at which the prompt can resume afterwards
    asked_at: float = field(default_factory=awake_s)

    @property
    def is_late(self) -> bool:
        return awake_s() - self.asked_at > RECALL_S_MAX


@dataclass(frozen=True, slots=True)
class _ReachedPrefix:
    """A prefix of the prompt that is in RAM or on disk, with the files on the path to its end."""

    position: int
    is_canonical: bool
    node: PrefixNode  # the last node of the prefix in RAM
    path: tuple[FileName, ...] = ()  # rows on disk, from `node` on


class DiskTier:
    """The SSD tier of one model's KV, on top of the thread that reads and writes files.

    Invariants: a record is inserted only after a node of the store, and only with the prompt's own
    tokens; no record is written twice, and a refused record is offered again. `_tips` maps the end
    nodes of conversations that lack a resume point on disk to the times when the requests ended.
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
        evictor.before_eviction = self.write_before_eviction

    # ------------------------------------------------------------ what a prompt needs

    def wanted(self, query: PrefixQuery, plan: ResumePlan, is_exact: bool) -> DiskRecall | None:
        """Return the records with which the prompt resumes at a later position than in `plan`.

        None where the disk has no such records. Opens no file.
        """
        assert plan.found is not None, "the plan was made without a search"
        by_end = self._reached(query, is_exact, plan.found.reached)
        best = sorted(by_end.values(), key=lambda reached: (reached.position, reached.is_canonical))
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
        """Return all prefixes of the prompt in RAM and on disk, by name."""
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
                    continue  # the prompt has no cut at the file's end
                if is_exact and not name.is_canonical:
                    self.counts["recalls_not_exact"] += 1
                    continue
                is_canonical = reached.is_canonical and name.is_canonical
                prefix = _ReachedPrefix(end, is_canonical, reached.node, (*reached.path, name))
                done[name.end] = todo[name.end] = prefix
        return done

    def _files_needed(self, reached: _ReachedPrefix, is_exact: bool) -> tuple[FileName, ...] | None:
        """Return all files that a resume at the prefix needs; None if one is not on disk."""
        windows = self._windows(reached)
        if windows is None:
            return None
        files = [*reached.path, *windows]
        if self._layout.has_state and (reached.path or reached.node.snapshot is None):
            rows = reached.path[-1] if reached.path else self._rows_file_name(reached.node)
            state = self._file_beside(rows, FileKind.STATE, is_exact)
            if state is None:
                return None
            files.append(state)
        return tuple(files)

    def _windows(self, reached: _ReachedPrefix) -> list[FileName] | None:
        """Return the window files that a resume needs, besides RAM; None if one is missing."""
        position, back_to = reached.position, max(0, reached.position - self._layout.window)
        lacking, node = [], reached.node
        for rows in reversed(reached.path):
            if position <= back_to:
                break
            lacking.append(rows)
            position -= rows.token_count
        for extent in within_window(node, node.position - back_to):
            if extent.window is None:
                lacking.append(self._rows_file_name(extent.end))
            elif not extent.window_covers(back_to):
                return None  # the extent's file has no more rows than the window in RAM
        found = [self._file_beside(rows, FileKind.WINDOW) for rows in lacking]
        windows = [name for name in found if name is not None]
        return windows if len(windows) == len(lacking) else None

    def _file_beside(
        self, rows: FileName, kind: FileKind, has_to_be_as_good: bool = True
    ) -> FileName | None:
        """Return the window or state file of the extent of `rows`; None where there is none.

        If the rows are canonical, the file must be canonical too, unless `has_to_be_as_good` is
        false: a state in fewer bits is fast although the rows are canonical.
        """
        for name in self._file_store.at(rows.end):
            is_as_good = name.is_canonical or not (rows.is_canonical and has_to_be_as_good)
            if name.kind is kind and name.start == rows.start and is_as_good:
                return name
        return None

    def _fits(self, files: Sequence[FileName]) -> bool:
        """Whether the rows fit the RAM budget at all."""
        rows = [name for name in files if name.kind is FileKind.ROWS]
        row_bytes, buffers = self._layers.row_cost(None)
        budget = self._store.budget
        # A file of packed rows is smaller than the unpacked rows. A small file counts as larger.
        nbytes = sum(
            min(name.token_count * row_bytes, self._file_store.nbytes(name)) for name in rows
        )
        return nbytes <= budget.bytes_max and len(rows) * buffers <= budget.buffers_max

    def _rows_file_name(self, node: PrefixNode) -> FileName:
        """Return the name of the rows file of the extent that ends at a node in RAM."""
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
        """Put records into the store; return how many tokens were restored.

        `tip` is the last node of the prompt in RAM. Stops at the first record that is missing, does
        not fit the prompt or finds no room: later records are of no use without this record.
        """
        count = 0
        tips = [tip]
        for record in records:
            if record is None:
                self.counts["recalls_missed"] += 1
                break
            try:
                is_inserted = self._take_in(record, query, line, tips)
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
            if not is_inserted:
                break
            if record.kind is FileKind.ROWS:
                count += len(record.tokens)
                line.tip = record.end  # the prompt then continues this line
        assert count <= query.limit, (count, query.limit)
        self.counts["recalled_tokens"] += count
        return count

    def _take_in(
        self, record: Record, query: PrefixQuery, line: LinePriority, tips: list[PrefixNode]
    ) -> bool:
        """Put one record into the store; return whether the store has the record now.

        Making room evicts nothing on the paths to `tips`.
        """
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
        """Whether a window or snapshot belongs to this extent, and is canonical where required."""
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
        node, extent = self._store.commit(
            start, record.end, record.tokens.copy(), record.is_canonical, line
        )
        assert node.position == end and not node.is_dropped, (node.position, end)
        tips[1:] = [node]
        if extent is not None:  # None: an equally good extent was committed meanwhile
            extent.is_stored, extent.is_stored_canonical = True, record.is_canonical
            if self._layers.layout.has_rows:
                self._store.set_body(extent, rows)
        if packed:
            self.counts["recalled_packed_tokens"] += len(record.tokens)
        return True

    def _rows_of(self, record: Record) -> tuple[KVRows, set[PackedFormat | None]]:
        """Return a record's rows in the record's own format, and those formats that no slot uses.

        Raises:
            UnreadableRecord: the rows are not this model's, or rows that are called canonical are
                packed in another format than a live slot's.
        """
        rows = self._layers.rows_from(record)
        end = record.position + len(record.tokens)
        if not self._layers.are_rows(rows, record.position, end):
            raise UnreadableRecord("rows of other shapes than the model's")
        packed = rows.formats - {None, self._rules.running_format}
        if packed and record.is_canonical:
            raise UnreadableRecord(f"rows in {packed} that call themselves canonical")
        return rows, packed

    def _has_room(self, nbytes: int, buffers: int, tips: Sequence[PrefixNode]) -> bool:
        """Make room for a record without evicting the paths to `tips`; return whether it fits.

        The record is needed now, so all other KV may be evicted: other KV is on disk, or is less
        likely to be needed.
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
        """Record that a prompt continues in the slot: nodes on its path are no longer ends.

        A resume point is written at the slot's node if other extents start at the node: prompts
        branch at such a node, and another prompt may resume there.
        """
        slot.system_end, slot.cuts = query.system_end, query.cuts
        node = slot.node
        if node.leaving and self._is_worth(node, EARLY_SHARE):
            self._write_point(node, slot if slot.position == node.position else None)
        for passed in (node, *(extent.start for extent in extents_back(node))):
            self._tips.pop(passed, None)

    def record_read(self, slot: LiveSlot) -> None:
        """Write the slot's rows after a prefill forward, and a resume point if one is due."""
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
            # The next chance is the next cut: a point at that cut is on disk one cut later.
            later = slot.cuts[min(number + 1, len(slot.cuts) - 1)]
            is_due = self._tail_tokens(node) + later - node.position > COLD_TOKENS
        else:
            is_due = self._is_worth(node)
        if is_due and not self._file_store.is_reserved and self._write_point(node, slot):
            self._drop_last_point(slot)
            slot.cold_point = node if is_amid else None

    def end(self, slot: LiveSlot) -> None:
        """Write the slot's rows after the request, and the resume points that are due."""
        self.write_slot(slot)
        slot.cold_point = None
        if self._layout.resumes_anywhere:
            return
        for node in self._ends_of(slot):
            slot_at_node = slot if node.position == slot.position else None
            is_due = self._is_worth(node) and not self._file_store.is_reserved
            if not (is_due and self._write_point(node, slot_at_node, is_needed=True)):
                self._tips[node] = self._clock()

    def write_before_release(self, slot: LiveSlot) -> None:
        """Write the slot's resume point, before the slot is emptied."""
        if slot.node in self._tips and slot.position == slot.node.position:
            self._write_tip(slot.node, slot, EARLY_SHARE)

    def write_before_eviction(self, extent: Extent) -> None:
        """Write the resume points that need an extent, before a part of the extent is evicted."""
        for node in list(self._tips):
            if extent is node.arrival or extent in within_window(node, self._layout.window):
                self._write_tip(node, None, EARLY_SHARE)

    def write_quiet(self, slots: Iterable[LiveSlot]) -> None:
        """Write the resume points of conversations that have been silent for a while."""
        until = self._clock() - QUIET_S
        quiet = [node for node, ended_at in self._tips.items() if ended_at <= until]
        by_node = {slot.node: slot for slot in slots if not slot.is_busy} if quiet else {}
        for node in quiet:
            self._write_tip(node, by_node.get(node), EARLY_SHARE)

    def write_rest(self, slots: Collection[LiveSlot]) -> None:
        """At shutdown, queue all KV that conversations continue from and that is not on disk."""
        self.thread.lift_limit()
        if self.thread.has_lost:
            for extent in self._store.extents:  # records still on disk are not written again
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
        by_node = {
            slot.node: slot
            for slot in slots
            if slot.position == slot.node.position
            and (not slot.is_busy or self._layers.depth(slot.cache) == slot.position)
        }  # slots with exactly the tokens of their nodes, and no decoded tokens after those
        newest_first = sorted(self._tips, key=lambda node: -self._tips[node])
        for node in newest_first:
            self._write_tip(node, by_node.get(node), None)

    def _ends_of(self, slot: LiveSlot) -> list[PrefixNode]:
        """Return the nodes where a conversation may continue: the prompt's end, the answer's end.

        A next prompt without the answer's reasoning continues at the end of this prompt. Nodes with
        a resume point on disk are left out.
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
        """Return the number of tokens from the last resume point on disk to `node`."""
        position = node.position
        while node.arrival is not None and not node.is_stored:
            node = node.arrival.start
        return position - node.position

    def _is_worth(self, node: PrefixNode, share: int = 1) -> bool:
        """Whether a resume point at `node` is worth the bytes that it takes.

        The rows of the tokens since the last point must take at least 1 / `share` of these bytes.
        """
        if self._layout.resumes_anywhere or node.is_stored or node.arrival is None:
            return False
        row_bytes = self._layers.row_bytes
        worth = self._point_bytes(node) // row_bytes if row_bytes else ROWLESS_WORTH_TOKENS
        return self._tail_tokens(node) * share >= worth

    def _point_bytes(self, node: PrefixNode) -> int:
        """Return the bytes to write for a resume point."""
        back_to, extents = node.position - self._layout.window, self._lacking_windows(node)
        tokens = sum(e.end.position - max(e.start.position, back_to) for e in extents)
        return self._layers.window_bytes(tokens) + self._layers.state_bytes

    def _lacking_windows(self, node: PrefixNode) -> list[Extent]:
        """Return the extents in the window before `node` that have no window rows on disk."""
        near = within_window(node, self._layout.window)
        return [extent for extent in near if not extent.is_window_stored]

    def _write_tip(self, node: PrefixNode, slot: LiveSlot | None, share: int | None) -> None:
        """Write the resume point at a conversation's end if the point is worth its bytes.

        `share` is the `share` of `_is_worth`; None = at shutdown, when SHUTDOWN_TOKENS are enough.
        The node of a point that is not yet worth its bytes stays in `_tips`.
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
        """Queue the resume point at `node`, from the store or from `slot`, which ends at `node`.

        Return True if the point is queued, or if a part of the point is no longer in memory. False
        means that the point has to be offered again.
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
        """Queue a record of an extent; return whether the record is queued or already on disk."""
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
        """Return an extent's window rows for a resume at `node`; None: not in memory."""
        back_to = max(0, node.position - self._layout.window)
        if extent.window_covers(back_to):
            return as_rows(extent.window)
        start = max(extent.start.position, back_to)
        if slot is None or self._layers.window_held(slot.cache) < node.position - start:
            return None
        later_tokens = node.position - extent.end.position
        return self._layers.copy_window(slot.cache, node.position - start, later_tokens)

    def _state(self, node: PrefixNode, slot: LiveSlot | None) -> LayerStates | None:
        if node.snapshot is not None:
            assert isinstance(node.snapshot, LayerStates)
            return node.snapshot
        return None if slot is None else self._layers.take_state(slot.cache)

    def _drop_last_point(self, slot: LiveSlot) -> None:
        """Remove the prefill's last resume point from disk: a later point has replaced it."""
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
        """Queue the slot's rows that are not on disk. Refused rows are offered again later.

        Copies rows that only the slot holds: one chunk in most cases.
        """
        for extent in slot.held_extents:
            if not extent.is_stored and extent in self._store:
                self.write(extent, slot)  # a short extent may fit where a long extent does not

    def write(self, extent: Extent, slot: LiveSlot | None) -> bool:
        """Queue an extent's rows, from the body or from `slot`; return whether the queue took them.

        No rows are copied that the queue would refuse.
        """
        form = None
        if extent.body is None and slot is not None and self._layout.has_rows:
            # All files of a packed extent are fast. A canonical snapshot of packed rows would later
            # be used with a canonical extent that reaches the same node by other cuts.
            form = self._rules.packing(slot, extent.end.position)
        follows_own = form is None and self._follows_own_cuts(extent)
        extent.is_stored_canonical = extent.is_canonical and follows_own
        is_on_disk = self.thread.holds(self._file_name(extent, FileKind.ROWS))
        if not is_on_disk and not self.thread.accepts(self._rows_bytes(extent, slot, form)):
            return False
        rows = KVRows(())
        if extent.body is not None:
            rows = as_rows(extent.body)
        elif self._layout.has_rows:
            assert slot is not None, "neither the store nor a slot holds the rows"
            start, end = extent.start.position, extent.end.position
            assert end <= slot.position, (end, slot.position)
            rows = self._layers.copy_rows(slot.cache, start, end, form)
        is_needed = not extent.line.is_side
        extent.is_stored = self._hand_over(extent, FileKind.ROWS, rows, is_needed)
        return extent.is_stored

    def _rows_bytes(self, extent: Extent, slot: LiveSlot | None, form: PackedFormat | None) -> int:
        """Return the bytes that an extent's rows take in a file."""
        if extent.body is not None:
            return extent.body.nbytes
        slot_format = slot.format if slot is not None else None
        return len(extent.tokens) * self._layers.row_cost(form or slot_format)[0]

    def _follows_own_cuts(self, extent: Extent) -> bool:
        """Whether the earlier extents of this path have the same cuts on disk as in RAM.

        Another worker may have reached the same prefix by other cuts. No prefill would write this
        extent after those cuts.
        """
        before = extent.start.arrival
        if before is None:
            return True
        on_disk = self._file_store.at(extent.start.name)
        canonical = [name for name in on_disk if name.kind is FileKind.ROWS and name.is_canonical]
        return all(name.start == before.start.name for name in canonical)


def file_name(extent: Extent, kind: FileKind, is_canonical: bool, cut_label: str) -> FileName:
    """Return the name of an extent's record of one kind."""
    ends, count = (extent.start.name, extent.end.name), len(extent.tokens)
    return FileName(kind, *ends, count, is_canonical, cut_label if is_canonical else "")
