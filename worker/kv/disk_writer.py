"""Writes committed KV of one model to disk: rows at once, and where prompts are to be resumed.

To go on behind a run of rows, layers that keep states or windows need these too: a resume point.
On a large hybrid it takes as many bytes as the rows of thousands of tokens, so that it is written
where a prompt is likely to go on, and once a conversation has grown by what it is worth: as many
tokens as have rows of as many bytes. What a killed worker loses is no more than that.
"""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from hearth.worker.cache.extent_store import Extent, ExtentStore, Joint, path_to
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.disk.disk_thread import DiskThread
from hearth.worker.disk.file_format import Array, Record
from hearth.worker.disk.file_names import FileKind, FileName
from hearth.worker.kv.kv_transfer import KeepRules
from hearth.worker.kv.layer_adapters import LayerMap
from hearth.worker.kv.live_slot import LiveSlot
from hearth.worker.kv.quantise_kv import KVRows, LayerStates, PackedFormat
from hearth.worker.kv.serialise_kv import arrays_of_rows, arrays_of_state

QUIET_S: Final = 30.0  # a conversation that is silent for so long may be so for hours
COLD_TOKENS: Final = 8_192  # of a long prefill that are read again at most if its worker is killed
EARLY_SHARE: Final = 4  # where other prompts begin alike, 1 / 4 of its worth is enough
ROWLESS_WORTH_TOKENS: Final = 2_048  # of a model that keeps states alone
SHUTDOWN_TOKENS: Final = 64  # fewer are sooner read again than written at the end


class DiskWriter:
    """Hands the disk's thread what is to be written.

    Nothing is written twice; what the thread refuses is offered again. `_tips` are the ends of
    conversations whose resume points are not on disk, by when their requests ended.
    Owner: the inference thread.
    """

    def __init__(
        self,
        store: ExtentStore,
        layers: LayerMap,
        rules: KeepRules,
        thread: DiskThread,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._store = store
        self._layers = layers
        self._rules = rules
        self._thread = thread
        self._file_store = thread.file_store
        self._clock = clock
        self._tips: dict[Joint, float] = {}

    # ------------------------------------------------------------ a request's life

    def begin(self, slot: LiveSlot, query: PrefixQuery) -> None:
        """A prompt goes on from what the slot holds: that is nobody's end any more.

        Where others went on before, prompts part: one may come back to it.
        """
        slot.system_end, slot.cuts = query.system_end, query.cuts
        joint: Joint | None = slot.joint
        if joint is not None and joint.leaving and self._is_worth(joint, EARLY_SHARE):
            self._write_point(joint, slot if slot.position == joint.position else None)
        while joint is not None:
            self._tips.pop(joint, None)
            joint = joint.arrival.start if joint.arrival is not None else None

    def note_read(self, slot: LiveSlot) -> None:
        """A prefill has come to the slot's joint."""
        self.write_slot(slot)
        joint = slot.joint
        if not self._has_points or joint.is_stored or joint.position != slot.position:
            return
        if joint.position == slot.system_end:
            if self._is_worth(joint, EARLY_SHARE):
                self._write_point(joint, slot)
            return
        ahead = _ahead(slot.cuts, joint.position)
        is_amid = ahead > 0
        is_late = self._tail_tokens(joint) + ahead > COLD_TOKENS
        is_due = is_late if is_amid else self._is_worth(joint)
        if is_due and not self._file_store.is_reserved and self._write_point(joint, slot):
            self._drop_former(slot)
            slot.cold_point = joint if is_amid else None

    def end(self, slot: LiveSlot) -> None:
        """The slot's request ended, however it did."""
        self.write_slot(slot)
        slot.cold_point = None
        if not self._has_points:
            return
        for joint in self._ends_of(slot):
            there = slot if joint.position == slot.position else None
            is_due = self._is_worth(joint) and not self._file_store.is_reserved
            if not (is_due and self._write_point(joint, there, is_needed=True)):
                self._tips[joint] = self._clock()

    def leave(self, slot: LiveSlot) -> None:
        """The slot is about to be emptied: write now what only it has."""
        if slot.joint in self._tips and slot.position == slot.joint.position:
            self._write_tip(slot.joint, slot, EARLY_SHARE)

    def make_way(self, extent: Extent) -> None:
        """Something of an extent is about to leave memory: write what conversations need of it."""
        window = self._store.layout.window
        for joint in list(self._tips):
            is_near = joint is extent.end or (
                window and joint.position - window < extent.end.position <= joint.position
            )
            if is_near and extent in path_to(joint):
                self._write_tip(joint, None, EARLY_SHARE)

    def write_quiet(self, slots: Iterable[LiveSlot]) -> None:
        """Write the resume points of conversations that have been silent for a while."""
        until = self._clock() - QUIET_S
        quiet = [joint for joint, ended_at in self._tips.items() if ended_at <= until]
        there = {slot.joint: slot for slot in slots if not slot.is_busy} if quiet else {}
        for joint in quiet:
            self._write_tip(joint, there.get(joint), EARLY_SHARE)

    def write_rest(self, slots: Collection[LiveSlot]) -> None:
        """Hand over, at the end, all that is not on disk and that a conversation goes on from."""
        self._thread.lift_bound()
        if self._thread.has_lost:
            for extent in self._store.extents:  # what is on disk is not written again
                extent.is_stored = extent.is_window_stored = False
            for joint in self._store.joints:
                joint.is_stored = False
        for slot in slots:
            self.write_slot(slot)
        for extent in list(self._store.extents):
            if not extent.is_stored and (extent.body is not None or not self._has_rows):
                self.write(extent, None)
        for slot in slots:
            if slot.is_busy and not slot.joint.is_dropped and slot.joint.arrival is not None:
                self._tips.setdefault(slot.joint, self._clock())
        there = {slot.joint: slot for slot in slots if self._ends_at_joint(slot)}
        newest_first = sorted(self._tips, key=lambda joint: -self._tips[joint])
        for joint in newest_first:
            self._write_tip(joint, there.get(joint), None)

    def _ends_at_joint(self, slot: LiveSlot) -> bool:
        """Whether a slot holds its joint's tokens and no more: nobody decodes in it."""
        is_read = bool(slot.cache) and self._layers.depth(slot.cache) == slot.position
        return slot.position == slot.joint.position and (not slot.is_busy or is_read)

    def _ends_of(self, slot: LiveSlot) -> list[Joint]:
        """Return where a conversation may go on: its prompt's end, and its answer's, in order.

        Its next prompt may leave out of the answer what the model thought.
        """
        found = [self._store.tip_of(slot.line) if slot.line is not None else None, slot.joint]
        return [
            joint
            for number, joint in enumerate(found)
            if joint is not None
            and joint.arrival is not None
            and not joint.is_stored
            and joint not in found[:number]
        ]

    # ------------------------------------------------------------ resume points

    @property
    def _has_points(self) -> bool:
        return not self._store.layout.resumes_anywhere

    def _tail_tokens(self, joint: Joint) -> int:
        """Return how many tokens before `joint` the last resume point on disk lies."""
        position = joint.position
        while joint.arrival is not None and not joint.is_stored:
            joint = joint.arrival.start
        return position - joint.position

    def _is_worth(self, joint: Joint, share: int = 1) -> bool:
        """Whether the tokens since the last point have rows of as many bytes as one here takes.

        Or of 1 / `share` of that.
        """
        if not self._has_points or joint.is_stored or joint.arrival is None:
            return False
        row_bytes = self._layers.row_bytes
        worth = ROWLESS_WORTH_TOKENS
        if row_bytes:
            worth = self._point_bytes(joint) // row_bytes
        return self._tail_tokens(joint) * share >= worth

    def _point_bytes(self, joint: Joint) -> int:
        """Return what is written for a resume point."""
        runs = self._window_runs(joint)
        window = self._layers.window_bytes(sum(end - start for _, start, end in runs))
        return window + (self._layers.state_bytes if self._store.layout.has_state else 0)

    def _window_runs(self, joint: Joint) -> list[tuple[Extent, int, int]]:
        """Return the runs within the window before `joint` whose window rows are not on disk."""
        back_to = max(0, joint.position - self._store.layout.window)
        return [
            (extent, max(extent.start.position, back_to), extent.end.position)
            for extent in self._within_window(joint)
            if not extent.is_window_stored
        ]

    def _within_window(self, joint: Joint) -> list[Extent]:
        """Return the runs that a resume at `joint` looks back to, the last first."""
        found, window = [], self._store.layout.window
        extent = joint.arrival
        while window and extent is not None and extent.end.position > joint.position - window:
            found.append(extent)
            extent = extent.start.arrival
        return found

    def _write_tip(self, joint: Joint, slot: LiveSlot | None, share: int | None) -> None:
        """Write the point at a conversation's end where that is worth it; None = at the end.

        What is not worth it yet may be at the end.
        """
        if joint.is_dropped or joint.is_stored:
            del self._tips[joint]
            return
        is_worth = self._tail_tokens(joint) >= SHUTDOWN_TOKENS
        if share is not None:
            is_worth = self._is_worth(joint, share)
        if is_worth and self._write_point(joint, slot, is_needed=True):
            del self._tips[joint]

    def _write_point(self, joint: Joint, slot: LiveSlot | None, is_needed: bool = False) -> bool:
        """Hand over what it takes to resume at `joint`, from RAM or a slot that ends there.

        Say whether nothing of it waits to be offered again. Where some of it is in memory no more,
        there is none.
        """
        arrival = joint.arrival
        assert arrival is not None, "nothing is kept at the root"
        is_allowed = is_needed or not self._file_store.is_reserved
        if not (is_allowed and arrival.is_stored):
            return False
        runs = [extent for extent, _, _ in self._window_runs(joint)]
        windows = [(extent, self._window(extent, joint, slot)) for extent in runs]
        state = self._state(joint, slot) if self._store.layout.has_state else LayerStates(())
        if state is None or any(window is None for _, window in windows):
            self.counts["points_missed"] += 1
            return True
        for extent, window in windows:
            assert window is not None
            extent.is_window_stored = self._hand_over(extent, FileKind.WINDOW, window, is_needed)
            if not extent.is_window_stored:
                return False
        joint.is_stored = not state.layers or self._hand_over(
            arrival, FileKind.STATE, state, is_needed
        )
        self.counts["points_written"] += joint.is_stored
        return joint.is_stored

    def _hand_over(
        self, extent: Extent, kind: FileKind, kept: KVRows | LayerStates, is_needed: bool
    ) -> bool:
        """Have the disk's thread write a record of an extent; say whether it is there or taken."""
        name = self._file_name(extent, kind)
        if self._thread.holds(name):
            return True
        record = Record(
            root=self._store.root.name,
            start=extent.start.name,
            end=extent.end.name,
            position=extent.start.position,
            tokens=extent.tokens,
            is_canonical=name.is_canonical,
            kind=kind,
            arrays=self._arrays(kept),
            rule=name.rule,
            source=kept,
        )
        return self._thread.write(record, is_needed)

    def _arrays(self, kept: KVRows | LayerStates) -> tuple[Array, ...]:
        if isinstance(kept, LayerStates):
            return arrays_of_state(kept)
        return arrays_of_rows(kept.layers)

    def _file_name(self, extent: Extent, kind: FileKind) -> FileName:
        is_fast = kind is FileKind.STATE and extent.end.is_snapshot_fast
        is_canonical = extent.is_stored_canonical and not is_fast
        return file_name(extent, kind, is_canonical, self._rules.cut_label)

    def _window(self, extent: Extent, joint: Joint, slot: LiveSlot | None) -> KVRows | None:
        """Return an extent's window rows as far as `joint` looks back; None: they are gone."""
        back_to = max(0, joint.position - self._store.layout.window)
        if extent.window_covers(back_to):
            return _as_rows(extent.window)
        start = max(extent.start.position, back_to)
        if slot is None or self._layers.window_held(slot.cache) < joint.position - start:
            return None
        behind = joint.position - extent.end.position
        return self._layers.copy_window(slot.cache, joint.position - start, behind)

    def _state(self, joint: Joint, slot: LiveSlot | None) -> LayerStates | None:
        if joint.snapshot is not None:
            assert isinstance(joint.snapshot, LayerStates)
            return joint.snapshot
        return None if slot is None else self._layers.take_state(slot.cache)

    def _drop_former(self, slot: LiveSlot) -> None:
        """Remove the point amid the slot's prefill that the next one has replaced."""
        joint, slot.cold_point = slot.cold_point, None
        if joint is None or joint.is_dropped or len(joint.leaving) != 1 or joint.resumed:
            return
        joint.is_stored = False
        needed = self._within_window(slot.joint)
        extents = [extent for extent in self._within_window(joint) if extent not in needed]
        for extent in extents:
            extent.is_window_stored = False
        names = [self._file_name(extent, FileKind.WINDOW) for extent in extents]
        if self._store.layout.has_state and joint.arrival is not None:
            names.append(self._file_name(joint.arrival, FileKind.STATE))
        self._thread.drop(names)

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
        form = self._packing(extent, slot)
        is_own = form is None and self._hangs_from_its_own(extent)
        extent.is_stored_canonical = extent.is_canonical and is_own
        is_there = self._thread.holds(self._file_name(extent, FileKind.ROWS))
        if not is_there and not self._thread.takes(self._rows_bytes(extent, slot, form)):
            return False
        rows = self._rows(extent, slot, form)
        is_needed = not extent.line.is_side
        extent.is_stored = self._hand_over(extent, FileKind.ROWS, rows, is_needed)
        return extent.is_stored

    @property
    def _has_rows(self) -> bool:
        return self._store.layout.has_rows

    def _packing(self, extent: Extent, slot: LiveSlot | None) -> PackedFormat | None:
        """Return how an extent's rows are to be packed; None is as they are.

        What is packed is fast, all its files alike: a snapshot beside it that counted as canonical
        could be taken for that of other cuts, once a canonical run is written in its place.
        """
        if extent.body is not None or slot is None or not self._has_rows:
            return None
        return self._rules.packing(slot, extent.end.position)

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
        there = [
            name for name in self._file_store.at(extent.start.name) if name.kind is FileKind.ROWS
        ]
        return all(name.start == before.start.name for name in there if name.is_canonical)

    def _rows(self, extent: Extent, slot: LiveSlot | None, form: PackedFormat | None) -> KVRows:
        if not self._has_rows:
            return KVRows(())
        if extent.body is not None:
            return _as_rows(extent.body)
        assert slot is not None, "rows that the store does not hold are a slot's"
        start, end = extent.start.position, extent.end.position
        assert end <= slot.position, (end, slot.position)
        return self._layers.copy_rows(slot.cache, start, end, form)


def _ahead(cuts: Sequence[int], position: int) -> int:
    """Return how many tokens are read until two more cuts; 0 behind the last one.

    That is when the next point could be on disk: it is written while a forward is computed.
    """
    number = bisect_right(cuts, position)
    return cuts[min(number + 1, len(cuts) - 1)] - position if number < len(cuts) else 0


def file_name(extent: Extent, kind: FileKind, is_canonical: bool, cut_label: str) -> FileName:
    """Return the name of an extent's record of one kind."""
    ends, count = (extent.start.name, extent.end.name), len(extent.tokens)
    return FileName(kind, *ends, count, is_canonical, cut_label if is_canonical else "")


def _as_rows(part: object) -> KVRows:
    assert isinstance(part, KVRows)
    return part
