"""Keeps joints, the extents between them and the snapshots at them, all without their bytes.

A joint is a prefix of tokens at which a prefill can be resumed. An extent is the immutable run of
KV between two joints: what one forward, or one generated turn, wrote. Branches share the extents
up to the joint where they part, so that nothing is kept twice and divergence copies nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final, Protocol

import numpy as np

from hearth.worker.cache.block_hash import PrefixHash, Tokens
from hearth.worker.cache.conversation_priority import LinePriority
from hearth.worker.cache.image_keys import image_count

MB: Final = 1024 * 1024
BUFFERS_MAX: Final = 400_000  # Metal allows 499,000 in a process; weights and steps need the rest


@dataclass(slots=True)
class Budget:
    """The limits of kept KV, and what is used of them. Live slots are not counted.

    `bytes_max` moves with the worker's share of the machine (`KVManager.share_out`).
    Invariant: what is used is never negative. Owner: the inference thread.
    """

    bytes_max: int
    buffers_max: int = BUFFERS_MAX
    bytes_used: int = 0
    buffers_used: int = 0

    def add(self, nbytes: int, buffers: int) -> None:
        self.bytes_used += nbytes
        self.buffers_used += buffers
        assert self.bytes_used >= 0 and self.buffers_used >= 0, (nbytes, buffers, self)

    @property
    def free_bytes(self) -> int:
        return max(0, self.bytes_max - self.bytes_used)

    def missing(self, nbytes: int, buffers: int) -> tuple[int, int]:
        """Return the bytes and buffers that must go before these fit; (0, 0) if they do."""
        return (
            max(0, self.bytes_used + nbytes - self.bytes_max),
            max(0, self.buffers_used + buffers - self.buffers_max),
        )


class KVArrays(Protocol):
    """Arrays that worker/kv/ keeps; opaque here."""

    @property
    def nbytes(self) -> int:
        """What they take."""

    @property
    def buffers(self) -> int:
        """How many there are."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the model's layers need in order to be resumed."""

    has_state: bool  # some layer keeps a state: a snapshot is needed at exactly the position
    window: int  # tokens that the widest window layer looks back; 0 = no such layer
    has_rows: bool = True  # some layer keeps K and V of every token

    @property
    def resumes_anywhere(self) -> bool:
        return not self.has_state and not self.window


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A prefix: `name` is its hash, `position` its length in tokens."""

    name: PrefixHash
    position: int
    arrival: "Extent | None" = field(default=None, repr=False)  # None at the root only
    leaving: "dict[Extent, None]" = field(default_factory=dict, repr=False)
    snapshot: KVArrays | None = None  # as canonical as its arrival ...
    is_snapshot_fast: bool = False  # ... but where a file had it in fewer bits
    pins: int = 0  # running requests that stand here
    snapshot_pinned: int = 0  # pins that keep its snapshot (worker/cache/pinned_prompts.py)
    resumed: int = 0  # requests that went on from here
    is_prompt_end: bool = False  # the last cut of some prompt
    is_in_head: bool = False  # amid the system and tools of some prompt, or at their end
    is_left_out: bool = False  # of an end that its conversation's next prompt has not got
    is_dropped: bool = False
    is_stored: bool = False  # what it takes to resume here was handed to the disk


@dataclass(eq=False, slots=True)
class Extent:
    """A run of tokens and where its K and V are: own bytes (`body`), or rows of live slots.

    Invariant: `body` is set or `holders` is not empty, unless no layer keeps rows.
    Canonical means made by a prefill at the canonical cuts over a canonical prefix.
    """

    start: PrefixNode
    end: PrefixNode
    tokens: Tokens = field(repr=False)
    is_canonical: bool
    line: LinePriority = field(repr=False)
    body: KVArrays | None = None  # rows of the layers that keep every token
    window: KVArrays | None = None  # rows of the window layers, of `window_from` and later
    window_from: int = 0
    holders: set[int] = field(default_factory=set)  # slots that hold its rows
    pinned: int = 0  # pins that keep it and its body ...
    window_pinned: int = 0  # ... and its window
    is_stored: bool = False  # its rows were handed to the disk ...
    is_stored_canonical: bool = False  # ... as canonical ones
    is_window_stored: bool = False  # and its window
    images: int = 0  # that begin in its tokens

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.body, self.window) if part is not None)

    def window_covers(self, position: int) -> bool:
        """Whether its window rows reach back to `position`, or to its start."""
        return self.window is not None and self.window_from <= max(self.start.position, position)


class ExtentStore:
    """All joints, extents and snapshots, and their bytes.

    Invariants (`scripts/harness/store_builders.py` checks them):
      rooted    every joint but the roots, which are at 0, has one extent that arrives at it
      pure      what a canonical extent starts from is canonical too
      findable  `_joints[name]` is the joint of that name
      counted   the budget's use is the sum over bodies, windows and snapshots
      backed    every extent has bytes, or a slot that holds them
      told      `version` is another one once anything has changed that a search sees
    Owner: the inference thread. No method blocks, and none may be called from elsewhere.
    """

    def __init__(self, root: PrefixHash, layout: Layout, budget: Budget) -> None:
        self.layout = layout
        self.budget = budget
        self.version = object()  # a plan is good for as long as this is the same
        self.root = PrefixNode(root, 0)
        # Kept for one key: KV in memory, by the key's own root
        self._joints: dict[PrefixHash, PrefixNode] = {root: self.root}
        self._extents: dict[Extent, None] = {}

    def __len__(self) -> int:
        return len(self._extents)

    def __contains__(self, extent: object) -> bool:
        return extent in self._extents

    def root_of(self, name: PrefixHash | None) -> PrefixNode:
        """Return the root called `name`, made where there is none; None is the model's own.

        Several API keys have one each, and no extent leads from one to another.
        """
        if name is None:
            return self.root
        return self._joints.setdefault(name, PrefixNode(name, 0))

    @property
    def extents(self) -> Iterator[Extent]:
        return iter(self._extents)

    @property
    def joints(self) -> Iterator[PrefixNode]:
        return iter(self._joints.values())

    def changed(self) -> None:
        """Note that a prompt may be resumed otherwise from now on: plans are made anew."""
        self.version = object()

    def joint(self, name: PrefixHash) -> PrefixNode | None:
        return self._joints.get(name)

    def tip_of(self, line: LinePriority) -> PrefixNode | None:
        """Return the last cut of a line's last prompt, where it is kept."""
        return self._joints.get(line.tip) if line.tip is not None else None

    def commit(
        self,
        start: PrefixNode,
        name: PrefixHash,
        tokens: Tokens,
        is_canonical: bool,
        line: LinePriority,
    ) -> tuple[PrefixNode, Extent | None]:
        """Make the prefix `name`, which is `start` and `tokens`, a joint; return it.

        With it comes the new extent, or None where what is there is as good: a canonical one, or
        for a fast one any. A new extent has no bytes yet: its committer gives it a holder.
        """
        assert not start.is_dropped and len(tokens) > 0, (start.position, len(tokens))
        assert self._joints.get(start.name) is start, start
        is_canonical &= start.arrival is None or start.arrival.is_canonical
        position = start.position + len(tokens)
        end = self._joints.get(name)
        if end is None:
            end = self._joints[name] = PrefixNode(name, position)
        assert end.position == position, (end.position, position)
        old = end.arrival
        if old is not None and (old.is_canonical or not is_canonical or old.pinned):
            return end, None
        self.changed()
        images = image_count(tokens)
        extent = Extent(start, end, tokens, is_canonical, line, window_from=position, images=images)
        start.leaving[extent] = None
        end.arrival = extent
        self._extents[extent] = None
        if old is not None:  # a fast one, superseded, and what led only to it
            self.set_snapshot(end, None)
            end.is_stored = False
            before = old.start
            self._forget(old)
            self.prune(before)
        return end, extent

    def set_body(self, extent: Extent, body: KVArrays | None) -> None:
        assert body is None or extent in self._extents, extent
        self._account(extent.body, body)
        extent.body = body

    def set_window(self, extent: Extent, window: KVArrays | None, window_from: int) -> None:
        """Keep the window layers' rows of `window_from` and later; None keeps none."""
        assert extent.start.position <= window_from <= extent.end.position, window_from
        assert window is None or extent in self._extents, extent
        self.changed()
        self._account(extent.window, window)
        extent.window, extent.window_from = window, window_from

    def set_snapshot(
        self, joint: PrefixNode, snapshot: KVArrays | None, is_fast: bool = False
    ) -> None:
        assert snapshot is None or not joint.is_dropped, joint
        self.changed()
        self._account(joint.snapshot, snapshot)
        joint.snapshot, joint.is_snapshot_fast = snapshot, is_fast

    def _account(self, old: KVArrays | None, new: KVArrays | None) -> None:
        for part, sign in ((old, -1), (new, 1)):
            if part is not None:
                self.budget.add(sign * part.nbytes, sign * part.buffers)

    def make_fast(self, extent: Extent) -> None:
        """Its rows are about to differ from a prefill's (they are stored quantised)."""
        self.changed()
        for one in runs_from(extent) if extent.is_canonical else ():
            one.is_canonical = False

    def let_go(self, extent: Extent, slot: int) -> None:
        """A slot will no longer hold its rows. Without bytes of its own it goes, with children."""
        extent.holders.discard(slot)
        if extent.body is None and not extent.holders and self.layout.has_rows:
            self.remove(extent)
        self.prune(extent.end)

    def prune(self, joint: PrefixNode) -> None:
        """Forget the runs that end here, as far back as nothing is left of them."""
        while not (joint.leaving or joint.pins or joint.snapshot):
            extent = joint.arrival
            if extent is None or extent.nbytes or extent.holders or extent.pinned:
                return
            joint = extent.start
            self.remove(extent)

    def remove(self, extent: Extent) -> None:
        """Forget an extent, and what can only be reached through it."""
        if extent not in self._extents:
            return
        for doomed in [*runs_from(extent)]:
            self._forget(doomed)
            doomed.end.is_dropped = True
            self.set_snapshot(doomed.end, None)
            del self._joints[doomed.end.name]

    def _forget(self, extent: Extent) -> None:
        self.changed()
        del self._extents[extent]
        extent.start.leaving.pop(extent, None)
        if extent.line.tip == extent.end.name:  # its conversation goes on from further back
            extent.line.tip = extent.start.name if extent.start.position else None
        if extent.end.arrival is extent:
            extent.end.arrival = None
        self.set_body(extent, None)
        self.set_window(extent, None, extent.end.position)
        extent.holders.clear()

    def clear(self) -> None:
        """Forget everything."""
        for root in [joint for joint in self._joints.values() if joint.position == 0]:
            for extent in list(root.leaving):
                self.remove(extent)
        assert not self._extents and self.budget.bytes_used == 0


def runs_back(joint: PrefixNode) -> Iterator[Extent]:
    """Yield the extents that lead from the root to a joint, the last first."""
    while (extent := joint.arrival) is not None:
        yield extent
        joint = extent.start


def path_to(joint: PrefixNode) -> list[Extent]:
    """Return the extents that lead from the root to a joint."""
    return [*runs_back(joint)][::-1]


def within_window(joint: PrefixNode, window: int) -> list[Extent]:
    """Return the extents of the last `window` tokens before a joint, the last first."""
    back_to = joint.position - window
    return [*takewhile(lambda extent: extent.end.position > back_to, runs_back(joint))]


def runs_from(extent: Extent) -> Iterator[Extent]:
    """Yield an extent and all that hangs from it, parents before their children."""
    todo = [extent]
    while todo:
        yield (extent := todo.pop())
        todo += extent.end.leaving


def same_tokens(extent: Extent, tokens: Tokens) -> bool:
    """Whether `tokens`, a whole prompt, says the same as `extent` in its place."""
    return np.array_equal(extent.tokens, tokens[extent.start.position : extent.end.position])
