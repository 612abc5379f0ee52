"""Keeps the tree of prefix nodes, extents and snapshots, and counts its bytes. Has no arrays.

A prefix node is a prefix of tokens at whose end a prefill can resume. An extent is the immutable KV
between two nodes that one forward or one generated turn wrote. Branches share all extents up to the
node where the branches part, so that no KV is kept twice and a divergence copies nothing.
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
BUFFERS_MAX: Final = 400_000  # of Metal's 499,000 per process; weights and steps need the rest


@dataclass(slots=True)
class Budget:
    """The limits of kept KV, and how much is used. Live slots are not counted.

    `bytes_max` changes with the worker's share of the machine (`KVManager.share_out`).
    Invariant: the used bytes and buffers are never negative. Owner: the inference thread.
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
        """Return the bytes and buffers to free so that `nbytes` in `buffers` fit; (0, 0) = none."""
        return (
            max(0, self.bytes_used + nbytes - self.bytes_max),
            max(0, self.buffers_used + buffers - self.buffers_max),
        )


class KVArrays(Protocol):
    """Arrays that worker/kv/ keeps, opaque to this module."""

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""

    @property
    def buffers(self) -> int:
        """The number of arrays."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The kinds of KV that the model's layers need to resume."""

    has_state: bool  # whether any layer keeps a state: a resume needs a snapshot at its position
    window: int  # length of the widest window layer, in tokens; 0 = no window layer
    has_rows: bool = True  # whether any layer keeps K and V of every token

    @property
    def resumes_anywhere(self) -> bool:
        return not self.has_state and not self.window


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A prefix: `name` is its hash, `position` its length in tokens."""

    name: PrefixHash
    position: int
    arrival: "Extent | None" = field(default=None, repr=False)  # extent ending here; None = root
    leaving: "dict[Extent, None]" = field(default_factory=dict, repr=False)  # extents starting here
    snapshot: KVArrays | None = None  # canonical if `arrival` is, unless `is_snapshot_fast`
    is_snapshot_fast: bool = False  # whether the snapshot's file had fewer bits
    pins: int = 0  # number of running requests at this node
    snapshot_pinned: int = 0  # number of pins on the snapshot (worker/cache/pinned_prompts.py)
    resumed: int = 0  # number of requests that resumed at this node
    is_prompt_end: bool = False  # whether this is the last cut of a prompt
    is_in_head: bool = False  # whether the node is within system and tools, or at their end
    is_left_out: bool = False  # whether the conversation's next prompt left this node out
    is_dropped: bool = False
    is_stored: bool = False  # whether the disk was given all KV that a resume at this node needs


@dataclass(eq=False, slots=True)
class Extent:
    """The tokens between two nodes. Their KV is in the extent's `body` or in live slots.

    Invariant: `body` is set or `holders` is not empty, unless no layer keeps rows.
    Canonical KV was written by a prefill at the canonical cuts after a canonical prefix.
    """

    start: PrefixNode
    end: PrefixNode
    tokens: Tokens = field(repr=False)
    is_canonical: bool
    line: LinePriority = field(repr=False)
    body: KVArrays | None = None  # rows of the layers that keep every token
    window: KVArrays | None = None  # rows of the window layers from position `window_from` on
    window_from: int = 0
    holders: set[int] = field(default_factory=set)  # numbers of the slots that hold the rows
    pinned: int = 0  # number of pins on the extent and on `body`
    window_pinned: int = 0  # number of pins on `window`
    is_stored: bool = False  # whether the rows were handed to the disk
    is_stored_canonical: bool = False  # whether the rows were handed to the disk as canonical
    is_window_stored: bool = False  # whether the window rows were handed to the disk
    images: int = 0  # number of images that begin in `tokens`

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.body, self.window) if part is not None)

    def window_covers(self, position: int) -> bool:
        """Whether the extent's window rows reach back to `position`, or to the extent's start."""
        return self.window is not None and self.window_from <= max(self.start.position, position)


class ExtentStore:
    """All nodes, extents and snapshots, and the sum of their bytes.

    Invariants (`scripts/harness/store_builders.py` checks them):
      rooted     every node has exactly one arriving extent; only roots, at position 0, have none
      pure       the extent before a canonical extent is canonical too
      findable   `_nodes[name]` is the node with this name
      counted    the budget's use is the sum over bodies, windows and snapshots
      backed     every extent has arrays of its own, or a slot that holds its rows
      versioned  `version` is a new object after every change that can alter a search
    Owner: the inference thread, which alone may call methods. No method blocks.
    """

    def __init__(self, root: PrefixHash, layout: Layout, budget: Budget) -> None:
        self.layout = layout
        self.budget = budget
        self.version = object()  # a plan is valid while this object stays the same
        self.root = PrefixNode(root, 0)
        # Kept for one key: KV in memory, by the key's own root
        self._nodes: dict[PrefixHash, PrefixNode] = {root: self.root}
        self._extents: dict[Extent, None] = {}

    def __len__(self) -> int:
        return len(self._extents)

    def __contains__(self, extent: object) -> bool:
        return extent in self._extents

    def root_of(self, name: PrefixHash | None) -> PrefixNode:
        """Return the root called `name`, created if missing; None means the model's own root.

        Each API key can have its own root. No extent leads from one root to another.
        """
        if name is None:
            return self.root
        return self._nodes.setdefault(name, PrefixNode(name, 0))

    @property
    def extents(self) -> Iterator[Extent]:
        return iter(self._extents)

    @property
    def nodes(self) -> Iterator[PrefixNode]:
        return iter(self._nodes.values())

    def invalidate_plans(self) -> None:
        """Invalidate all plans: from now on a search may find other KV."""
        self.version = object()

    def node(self, name: PrefixHash) -> PrefixNode | None:
        return self._nodes.get(name)

    def tip_of(self, line: LinePriority) -> PrefixNode | None:
        """Return the node at the last cut of a line's last prompt; None if it is not kept."""
        return self._nodes.get(line.tip) if line.tip is not None else None

    def commit(
        self,
        start: PrefixNode,
        name: PrefixHash,
        tokens: Tokens,
        is_canonical: bool,
        line: LinePriority,
    ) -> tuple[PrefixNode, Extent | None]:
        """Add the extent `tokens` from `start` to the node `name`; return node and extent.

        The extent is None if the kept extent is as good. A canonical or pinned extent always is; a
        fast extent is if the new extent would be fast. A new extent has no bytes until the caller
        adds a holder.
        """
        assert not start.is_dropped and len(tokens) > 0, (start.position, len(tokens))
        assert self._nodes.get(start.name) is start, start
        is_canonical &= start.arrival is None or start.arrival.is_canonical
        position = start.position + len(tokens)
        end = self._nodes.get(name)
        if end is None:
            end = self._nodes[name] = PrefixNode(name, position)
        assert end.position == position, (end.position, position)
        old = end.arrival
        if old is not None and (old.is_canonical or not is_canonical or old.pinned):
            return end, None
        self.invalidate_plans()
        images = image_count(tokens)
        extent = Extent(start, end, tokens, is_canonical, line, window_from=position, images=images)
        start.leaving[extent] = None
        end.arrival = extent
        self._extents[extent] = None
        if old is not None:  # a fast extent, now replaced; no other extent may leave its start
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
        """Keep the window layers' rows from position `window_from` on; None drops them."""
        assert extent.start.position <= window_from <= extent.end.position, window_from
        assert window is None or extent in self._extents, extent
        self.invalidate_plans()
        self._account(extent.window, window)
        extent.window, extent.window_from = window, window_from

    def set_snapshot(
        self, node: PrefixNode, snapshot: KVArrays | None, is_fast: bool = False
    ) -> None:
        assert snapshot is None or not node.is_dropped, node
        self.invalidate_plans()
        self._account(node.snapshot, snapshot)
        node.snapshot, node.is_snapshot_fast = snapshot, is_fast

    def _account(self, old: KVArrays | None, new: KVArrays | None) -> None:
        for part, sign in ((old, -1), (new, 1)):
            if part is not None:
                self.budget.add(sign * part.nbytes, sign * part.buffers)

    def make_fast(self, extent: Extent) -> None:
        """Mark an extent and its descendants fast, before its rows are stored quantised."""
        self.invalidate_plans()
        for later in extents_from(extent) if extent.is_canonical else ():
            later.is_canonical = False

    def remove_holder(self, extent: Extent, slot: int) -> None:
        """Remove a slot from the holders. An extent without bytes goes, with its descendants."""
        extent.holders.discard(slot)
        if extent.body is None and not extent.holders and self.layout.has_rows:
            self.remove(extent)
        self.prune(extent.end)

    def prune(self, node: PrefixNode) -> None:
        """Forget the extents that lead to `node`, back to the first extent still of use."""
        while not (node.leaving or node.pins or node.snapshot):
            extent = node.arrival
            if extent is None or extent.nbytes or extent.holders or extent.pinned:
                return
            node = extent.start
            self.remove(extent)

    def remove(self, extent: Extent) -> None:
        """Forget an extent and all its descendants."""
        if extent not in self._extents:
            return
        for removed in [*extents_from(extent)]:
            self._forget(removed)
            removed.end.is_dropped = True
            self.set_snapshot(removed.end, None)
            del self._nodes[removed.end.name]

    def _forget(self, extent: Extent) -> None:
        self.invalidate_plans()
        del self._extents[extent]
        extent.start.leaving.pop(extent, None)
        if extent.line.tip == extent.end.name:  # the conversation now resumes further back
            extent.line.tip = extent.start.name if extent.start.position else None
        if extent.end.arrival is extent:
            extent.end.arrival = None
        self.set_body(extent, None)
        self.set_window(extent, None, extent.end.position)
        extent.holders.clear()

    def clear(self) -> None:
        """Forget all extents of all roots."""
        for root in [node for node in self._nodes.values() if node.position == 0]:
            for extent in list(root.leaving):
                self.remove(extent)
        assert not self._extents and self.budget.bytes_used == 0


def extents_back(node: PrefixNode) -> Iterator[Extent]:
    """Yield the extents from a node back to the root."""
    while (extent := node.arrival) is not None:
        yield extent
        node = extent.start


def path_to(node: PrefixNode) -> list[Extent]:
    """Return the extents from the root to a node."""
    return [*extents_back(node)][::-1]


def within_window(node: PrefixNode, window: int) -> list[Extent]:
    """Return the extents of the last `window` tokens before a node, last extent first."""
    back_to = node.position - window
    return [*takewhile(lambda extent: extent.end.position > back_to, extents_back(node))]


def extents_from(extent: Extent) -> Iterator[Extent]:
    """Yield an extent and all its descendants, parents before their children."""
    todo = [extent]
    while todo:
        yield (extent := todo.pop())
        todo += extent.end.leaving


def same_tokens(extent: Extent, tokens: Tokens) -> bool:
    """Whether a whole prompt, `tokens`, has the extent's tokens at the extent's position."""
    return np.array_equal(extent.tokens, tokens[extent.start.position : extent.end.position])
