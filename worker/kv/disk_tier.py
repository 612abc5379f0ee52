"""Brings back from disk what prompts of one model go on from.

What a prompt needs is read before the prompt gets a slot, and goes into the store: planning sees
RAM only. `DiskWriter` decides what is written.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, TypeVar

import numpy as np

from hearth.shared.suspending_clock import awake_s
from hearth.worker.cache.block_hash import PrefixHash, prefix_hashes
from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.eviction import Evictor
from hearth.worker.cache.extent_store import Extent, ExtentStore, Joint, path_to
from hearth.worker.cache.pinned_prompts import Pin
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.cache.resume_planner import ResumePlan
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import Record
from hearth.worker.disk.file_names import FileKind, FileName
from hearth.worker.kv.disk_writer import DiskWriter, file_name
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.quantise_kv import KVRows, LayerStates, QuantFormat
from hearth.worker.kv.serialise_kv import UnreadableRecord

RowsOrStates = TypeVar("RowsOrStates", KVRows, LayerStates)

log = logging.getLogger(__name__)

RECALL_S_MAX: Final = 20.0  # from a disk that takes longer nothing is worth waiting for


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
    joint: Joint  # up to which it is in RAM
    path: tuple[FileName, ...] = ()  # rows on disk, from there


class DiskTier:
    """The SSD tier of one model's KV, above the thread that reads and writes files.

    Invariant: what is taken in hangs from a joint of the store, and is the prompt's own tokens.
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
        self.writer = DiskWriter(store, layers, rules, disk_thread)
        evictor.before_eviction = self.writer.make_way
        self.counts: Counter[str] = Counter()
        self._store = store
        self._layers = layers
        self._evictor = evictor
        self._rules = rules
        self._file_store = disk_thread.file_store

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
        self, query: PrefixQuery, is_exact: bool, kept: Mapping[Joint, bool]
    ) -> dict[PrefixHash, _ReachedPrefix]:
        """Return the prefixes of the prompt that are in RAM, and those that disk leads to."""
        todo: dict[PrefixHash, _ReachedPrefix] = {
            joint.name: _ReachedPrefix(joint.position, is_canonical, joint)
            for joint, is_canonical in kept.items()
            if joint.position <= query.limit
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
                there = _ReachedPrefix(end, is_canonical, reached.joint, (*reached.path, name))
                done[name.end] = todo[name.end] = there
        return done

    def _files_needed(self, reached: _ReachedPrefix, is_exact: bool) -> tuple[FileName, ...] | None:
        """Return all that is needed to go on there; None where the disk lacks some of it."""
        layout, files = self._store.layout, list(reached.path)
        if layout.window:
            windows = self._windows(reached)
            if windows is None:
                return None
            files += windows
        if layout.has_state and (reached.path or reached.joint.snapshot is None):
            run = reached.path[-1] if reached.path else self._rows_file_name(reached.joint)
            state = self._file_beside(run, FileKind.STATE, is_exact)
            if state is None:
                return None
            files.append(state)
        return tuple(files)

    def _windows(self, reached: _ReachedPrefix) -> list[FileName] | None:
        """Return the window rows that a resume looks back to and RAM lacks."""
        position, back_to = reached.position, max(0, reached.position - self._store.layout.window)
        lacking, joint = [], reached.joint
        for run in reversed(reached.path):
            if position > back_to:
                lacking.append(run)
            elif joint.position <= back_to:
                break
            position -= run.token_count
        while joint.position > back_to and joint.arrival is not None:
            if joint.arrival.window is None:
                lacking.append(self._rows_file_name(joint))
            elif not joint.arrival.window_covers(back_to):
                return None  # nor does what was written when it was made
            joint = joint.arrival.start
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

    def _rows_file_name(self, joint: Joint) -> FileName:
        """Return the name of the rows that arrive at a joint in RAM."""
        arrival = joint.arrival
        assert arrival is not None, "nothing is kept at the root"
        return file_name(arrival, FileKind.ROWS, arrival.is_canonical, self._rules.cut_label)

    # ------------------------------------------------------------ from disk

    def take_in(
        self, records: Sequence[Record | None], query: PrefixQuery, tip: Joint, line: LinePriority
    ) -> int:
        """Put what was read into the store; return how many tokens came back.

        `tip` is the last joint of the prompt in RAM. Ends at the first record that is missing, does
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
                self._warn(reason)
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
        self, record: Record, query: PrefixQuery, line: LinePriority, tips: list[Joint]
    ) -> bool:
        """Put one record into the store; say whether it is there. `tips` are not to be lost."""
        if record.kind is FileKind.ROWS:
            return self._take_in_rows(record, query, line, tips)
        joint = self._store.joint(record.end)
        arrival = joint.arrival if joint is not None else None
        may_be_fast = record.kind is FileKind.STATE and not self._rules.is_exact
        if joint is None or arrival is None or not _fits_beside(record, arrival, may_be_fast):
            self.counts["recalls_homeless"] += 1
            return False
        if record.kind is FileKind.WINDOW:
            if arrival.window is None and (
                window := self._with_room(self._window_of(record), tips)
            ):
                rows = window.layers[0].arrays[0].shape[2]
                self._store.set_window(arrival, window, joint.position - rows)
                arrival.is_window_stored = True
                joint.is_stored = not self._store.layout.has_state
            return arrival.window is not None
        if joint.snapshot is None and (state := self._with_room(self._state_of(record), tips)):
            self._store.set_snapshot(joint, state, is_fast=not record.is_canonical)
            joint.is_stored = True
        return joint.snapshot is not None

    def _take_in_rows(
        self, record: Record, query: PrefixQuery, line: LinePriority, tips: list[Joint]
    ) -> bool:
        start = self._store.joint(record.start)
        end = record.position + len(record.tokens)
        if start is None or start.position != record.position:
            self.counts["recalls_homeless"] += 1
            return False
        if not np.array_equal(record.tokens, query.tokens[record.position : end]):
            self.counts["recalls_other_tokens"] += 1
            return False
        tips[1:] = [start]
        form = self._rules.running_format
        rows = self._rows_of(record, form)
        body = self._with_room(rows, tips)
        if body is None:
            return False
        there, extent = self._store.commit(
            start, record.end, record.tokens.copy(), record.is_canonical, line
        )
        assert there.position == end and not there.is_dropped, (there.position, end)
        tips[1:] = [there]
        if extent is not None:  # else as good a one has come meanwhile
            extent.is_stored, extent.is_stored_canonical = True, record.is_canonical
            if self._layers.layout.has_rows:
                self._store.set_body(extent, body)
        if rows.formats - {None, form}:
            self.counts["recalled_packed_tokens"] += len(record.tokens)
        return True

    def _rows_of(self, record: Record, form: QuantFormat | None) -> KVRows:
        """Return a record's rows, in the format that it names, whatever the settings are now.

        Raises:
            UnreadableRecord: they are not this model's, or called canonical and packed otherwise
                than in `form`, as live slots have them.
        """
        rows = self._layers.rows_from(record)
        if not self._layers.are_rows(rows, len(record.tokens)):
            raise UnreadableRecord("rows of other shapes than the model's")
        packed = rows.formats - {None, form}
        if packed and record.is_canonical:
            raise UnreadableRecord(f"rows in {packed} that call themselves canonical")
        return rows

    def _window_of(self, record: Record) -> KVRows:
        window = self._layers.rows_from(record)
        if not self._layers.are_window_rows(window, len(record.tokens)):
            raise UnreadableRecord("window rows of other shapes than the model's")
        return window

    def _state_of(self, record: Record) -> LayerStates:
        state = self._layers.state_from(record)
        if not self._layers.is_state(state):
            raise UnreadableRecord("a state of other shapes than the model's")
        return state

    def _warn(self, reason: UnreadableRecord) -> None:
        if self.counts["recalls_unreadable"] == 1:
            log.warning(
                "a KV file is removed, it cannot be read here: %s. Said once; later ones are "
                "counted (recalls_unreadable in /v1/cache).",
                reason,
            )

    def _with_room(self, part: RowsOrStates, tips: Sequence[Joint]) -> RowsOrStates | None:
        """Return what was read where room can be made for it, and nothing of `tips`' paths goes.

        It is needed now; what makes way for it is on disk, or is less likely needed than that.
        """
        if self._store.budget.missing(part.nbytes, part.buffers) == (0, 0):
            return part
        extents = {extent: None for tip in tips for extent in path_to(tip)}
        path = Pin.of("", tuple(extents))
        path.mark(1)
        has_room = self._evictor.make_room(part.nbytes, part.buffers, math.inf, time.monotonic())
        path.mark(-1)
        if has_room:
            return part
        self.counts["recalls_refused"] += 1
        return None


def _fits_beside(record: Record, arrival: Extent, may_be_fast: bool) -> bool:
    """Whether a window or a snapshot is of this very run, and as canonical as it has to be."""
    is_as_good = record.is_canonical or may_be_fast or not arrival.is_canonical
    return arrival.start.name == record.start and is_as_good


def _as_rows(part: Any) -> KVRows:
    assert isinstance(part, KVRows)
    return part
