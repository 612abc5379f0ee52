"""Evicts kept KV to make room: KV of least worth first, and no KV worth more than the new KV.

Worth is likelihood of need x tokens to prefill again / bytes. Eviction goes leaf by leaf, so that
a shared extent outlives its branches. Kept KV that a live slot has too goes before all other KV.
Source: the cost-benefit rule of Greedy-Dual-Size (Cao, Irani 1997), with lines for frequency.
"""

import heapq
import itertools
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from hearth.worker.cache.conversation_priority import SPONSOR_SILENT_S, LinePriority
from hearth.worker.cache.extent_store import (
    Extent,
    ExtentStore,
    PrefixNode,
    extents_from,
    path_to,
    within_window,
)
from hearth.worker.cache.prefill_grid import PrefillGrid

SLACK = 0.02  # share of the budget that is freed in advance, so that parts are sorted less often
LAST_MAX = 32  # number of lines whose evictions are remembered

# How likely a request of a line resumes at a node, by the kind of node. The likelihoods decide
# which snapshots and windows stay. A snapshot of a big hybrid is as large as the KV of thousands of
# tokens, and every cut takes a snapshot. When memory is short, the snapshots that save the fewest
# tokens for their bytes go first. So snapshots thin out evenly, and stay longest at nodes of the
# kinds listed first.
TIP: Final = 1.0  # the end of a line
NEWEST: Final = 1.0  # a node in the last messages of a prompt, which some clients rewrite each time
TRUNK: Final = 0.2  # a node at which several requests have resumed
PARTING: Final = 0.1  # a node where one request resumed, a prompt's end, or within system and tools
HEADER: Final = 0.05  # an older message's beginning, at which an edit would diverge
GRID: Final = 0.01  # a node within a message
NEAR: Final = 2_048  # length of a prompt's end, in tokens, that counts as the last messages


@dataclass(slots=True)
class EvictedEntry:
    """Everything evicted so far of one line."""

    line: LinePriority
    root: PrefixNode  # root of the line's prompts: an API key can have its own root
    at: float = 0.0  # time of the last eviction, in seconds since the epoch
    parts: Counter[str] = field(default_factory=Counter)  # evicted parts by kind
    nbytes: int = 0
    tokens: int = 0  # tokens without rows in memory now

    def as_row(self) -> dict[str, object]:
        return {
            "line": self.line.number,
            "at": round(self.at, 3),
            "parts": dict(self.parts),
            "bytes": self.nbytes,
            "tokens": self.tokens,
        }


# The groups in the order of eviction: see docs/cache.md. Parts of one group go by their worth.
NEEDLESS, KEPT, LIVE = range(3)
Rank = tuple[float, ...]  # (group, worth, ...); the lowest rank goes first


@dataclass(frozen=True, slots=True)
class Freed:
    """What the eviction of a candidate freed."""

    nbytes: int
    tokens: int = 0  # tokens without rows in memory now
    exposed: "Sequence[Candidate]" = ()  # new candidates: parts that could not go before
    parts: int = 1
    is_loss: bool = True  # False if prompts can resume from a copy elsewhere


class Candidate(Protocol):
    """A part of the memory in use that may be evicted now."""

    @property
    def kind(self) -> str:
        """The part's name in reports of evictions."""

    @property
    def extent(self) -> Extent | None:
        """The last extent that needs the part; None if the part belongs to no prompt."""

    def is_held(self) -> bool:
        """Whether the part is still in memory."""

    def rank(self, evictor: "Evictor", now: float) -> Rank:
        """Return the part's rank in the order of eviction."""

    def evict(self, evictor: "Evictor") -> Freed:
        """Free the part."""


class Evictor:
    """Evicts parts of kept KV and of slots, by one ranking for all reasons.

    Invariant: pinned KV and the path to a running request's node are not evicted.
    Owner: the inference thread.
    """

    def __init__(self, store: ExtentStore, chunk: int, ttl_s: float) -> None:
        self.store = store
        self._grid = PrefillGrid(chunk)
        self._ttl_s = ttl_s
        self.evicted: Counter[str] = Counter()  # evicted parts by kind
        self.evicted_bytes: Counter[str] = Counter()  # freed bytes by kind
        # Called with an extent before any part of the extent is evicted.
        self.before_eviction: Callable[[Extent], None] = lambda _: None
        # Kept for one key: hashes of evicted KV, for `/v1/cache`
        self._last: OrderedDict[LinePriority, EvictedEntry] = OrderedDict()  # newest last

    @property
    def evictions(self) -> int:
        return self.evicted.total()

    @property
    def last(self) -> list[EvictedEntry]:
        """The lines with the last evictions, newest first, LAST_MAX at most."""
        return list(reversed(self._last.values()))

    def make_room(self, nbytes: int, buffers: int, worth: float, now: float) -> bool:
        """Free room in kept KV's budget for `nbytes` in `buffers`; return whether they fit now.

        `worth` is the worth of the new KV (`worth_of`). No part worth more is evicted.
        """
        assert nbytes >= 0 and buffers >= 0, (nbytes, buffers)
        budget = self.store.budget
        if nbytes > budget.bytes_max or buffers > budget.buffers_max:
            return False
        if budget.missing(nbytes, buffers) == (0, 0):
            return True
        room = nbytes + min(int(budget.bytes_max * SLACK), budget.bytes_max - nbytes)

        self.free(
            self.kept_parts(),
            lambda _freed, _next: budget.missing(room, buffers) == (0, 0),
            now,
            (KEPT, worth),
        )
        return budget.missing(nbytes, buffers) == (0, 0)

    def free(
        self,
        candidates: Iterable[Candidate],
        is_enough: Callable[[int, Rank], bool],
        now: float,
        rank_max: Rank = (math.inf,),
        among: Container[Extent] | None = None,
    ) -> int:
        """Evict candidates, lowest rank first, until `is_enough`; return the freed bytes.

        `is_enough` gets the bytes freed so far and the rank of the next candidate. No candidate
        above `rank_max` is evicted, and no newly exposed extent outside `among`.
        """
        order, freed = itertools.count(), 0  # equal ranks go in the order of arrival
        heap = [(candidate.rank(self, now), next(order), candidate) for candidate in candidates]
        heapq.heapify(heap)
        while heap and not is_enough(freed, heap[0][0]):
            last_rank, _, candidate = heapq.heappop(heap)
            if not candidate.is_held():
                continue
            rank = candidate.rank(self, now)
            if rank > last_rank:  # the part's worth grew when a neighbour was evicted
                heapq.heappush(heap, (rank, next(order), candidate))
                continue
            if rank > rank_max:
                break
            extent = candidate.extent
            entry = self._entry_of(extent)  # before the eviction cuts the path to the root
            result = candidate.evict(self)
            assert result.nbytes >= 0, (candidate.kind, result)
            for exposed in result.exposed:
                if among is None or exposed.extent in among:
                    heapq.heappush(heap, (exposed.rank(self, now), next(order), exposed))
            freed += result.nbytes
            if result.is_loss:
                self._record(candidate.kind, entry, result)
        return freed

    def _entry_of(self, extent: Extent | None) -> EvictedEntry | None:
        """Return the entry of an extent's line, now the newest entry; None without an extent."""
        if extent is None:
            return None
        if extent.line not in self._last:
            self._last[extent.line] = EvictedEntry(extent.line, path_to(extent.end)[0].start)
        self._last.move_to_end(extent.line)
        if len(self._last) > LAST_MAX:
            self._last.popitem(last=False)
        return self._last[extent.line]

    def _record(self, kind: str, entry: EvictedEntry | None, freed: Freed) -> None:
        self.evicted[kind] += freed.parts
        self.evicted_bytes[kind] += freed.nbytes
        if entry is not None:
            entry.at = time.time()
            entry.parts[kind] += freed.parts
            entry.nbytes += freed.nbytes
            entry.tokens += freed.tokens

    def worth_of(
        self, line: LinePriority, weight: float, tokens: int, nbytes: int, now: float
    ) -> float:
        """Return the worth of `nbytes` of the line's KV that save the prefill of `tokens`.

        `weight` is the likelihood that a request of the line resumes from this KV.
        """
        return line.likelihood(now, self._ttl_s) * weight * tokens / max(1, nbytes)

    def resume_worth(self, node: PrefixNode, nbytes: int, now: float) -> float:
        """Return the worth of `nbytes` that a resume at `node` needs."""
        assert node.arrival is not None, "nothing is kept at the root"
        weight = likelihood(node, self._grid)
        tokens = node.position - self._resumable_to(node.arrival.start)
        return self.worth_of(node.arrival.line, weight, tokens, nbytes, now)

    def window_worth(self, extent: Extent, nbytes: int, now: float) -> float:
        """Return the worth of an extent's window rows: the prefill that they save.

        A resume needs all window rows before its node, often from several extents; if some rows are
        missing, the other rows save nothing. The tokens up to the next resumable node count too: a
        prompt that diverges before that node would prefill these tokens again. So resumable nodes
        thin out evenly.
        """
        window, worth, todo = self.store.layout.window, 0.0, [extent.end]
        before = self._resumable_to(extent.start)
        while todo:
            node = todo.pop()
            is_tip = not node.leaving or node.pins  # missing parts of the resume may be on disk
            if is_tip or self._is_resumable(node):
                assert node.arrival is not None, "the root has no window"
                weight, tokens = likelihood(node, self._grid), self._next_after(node) - before
                line = node.arrival.line
                worth = max(worth, self.worth_of(line, weight, tokens, nbytes, now))
            later = (branch.end for branch in node.leaving)
            todo += [end for end in later if end.position - window < extent.end.position]
        return worth

    def leaf_worth(self, extent: Extent, nbytes: int, now: float) -> float:
        """Return the worth of a leaf's bytes; zero if no prompt can resume at the leaf's end."""
        is_of_use = self._is_resumable(extent.end)
        return self.resume_worth(extent.end, nbytes, now) if is_of_use else 0.0

    def likelihoods_from(self, extent: Extent, now: float) -> dict[Extent, float]:
        """Return how likely any line needs this extent, and the same for its descendants."""
        likelihoods: dict[Extent, float] = {}
        for branch in reversed([*extents_from(extent)]):  # children before their parents
            beyond = (likelihoods[later] for later in branch.end.leaving)
            likelihoods[branch] = max([branch.line.likelihood(now, self._ttl_s), *beyond])
        return likelihoods

    def _resumable_to(self, node: PrefixNode) -> int:
        """Return the last position up to `node` at which a prompt can resume."""
        while node.arrival is not None and not self._is_resumable(node):
            node = node.arrival.start
        return node.position

    def _next_after(self, node: PrefixNode) -> int:
        """Return the next position after `node` to resume at; if none, the last kept position."""
        position, todo = node.position, [extent.end for extent in node.leaving]
        while todo:
            node = todo.pop()
            position = max(position, node.position)
            if self._is_resumable(node):
                return node.position
            todo += [extent.end for extent in node.leaving]
        return position

    def _is_resumable(self, node: PrefixNode) -> bool:
        """Whether a prompt can resume at `node`: the needed snapshot and window are kept."""
        layout = self.store.layout
        if layout.has_state and node.snapshot is None:
            return False
        back_to = max(0, node.position - layout.window)
        near = within_window(node, layout.window)
        return all(extent.window_covers(back_to) for extent in near)

    def expired(self, among: Iterable[Extent]) -> "list[Candidate]":
        """Return the extents of `among` that may go because of their age, with their end nodes.

        Unlike other leaves, these extents may have rows in slots.
        """
        return [_KeptPart("expired", extent) for extent in among if _is_end(extent)]

    def kept_parts(self) -> "list[Candidate]":
        """Return the parts of the store that may go now."""
        extents, found = list(self.store.extents), list[Candidate]()
        for extent in extents:
            if extent.body is not None and extent.holders and not extent.pinned:
                found.append(_KeptPart("copy", extent))
            if extent.window is not None and not extent.window_pinned:
                found.append(_KeptPart("window", extent))
            if _is_leaf(extent) and extent.nbytes:
                found.append(_KeptPart("extent", extent))
        snapshots = [
            extent
            for extent in extents
            if extent.end.snapshot is not None and not extent.end.snapshot_pinned
        ]
        return [*found, *(_KeptPart("snapshot", extent) for extent in snapshots)]


@dataclass(frozen=True, slots=True)
class _KeptPart:
    """A part of an extent's kept KV.

    "copy"      rows that a slot holds too, so that evicting them costs nothing
    "window"    window rows
    "snapshot"  the snapshot at the extent's end
    "extent"    the whole extent, if it has no branch
    "expired"   the whole extent, because of its age
    """

    kind: Literal["copy", "window", "snapshot", "extent", "expired"]
    extent: Extent

    def is_held(self) -> bool:
        extent = self.extent
        match self.kind:
            case "copy":
                return extent.body is not None and bool(extent.holders)
            case "window":
                return extent.window is not None
            case "snapshot":
                return extent.end.snapshot is not None
        return _is_end(extent) if self.kind == "expired" else _is_leaf(extent)

    def rank(self, evictor: Evictor, now: float) -> Rank:
        extent, snapshot = self.extent, self.extent.end.snapshot
        state_bytes = snapshot.nbytes if snapshot is not None else 0
        match self.kind:
            case "copy":
                return KEPT, 0.0
            case "window":
                assert extent.window is not None
                return KEPT, evictor.window_worth(extent, extent.window.nbytes, now)
            case "snapshot":
                return KEPT, evictor.resume_worth(extent.end, state_bytes, now)
        return KEPT, evictor.leaf_worth(extent, extent.nbytes + state_bytes, now)

    def evict(self, evictor: Evictor) -> Freed:
        store, extent = evictor.store, self.extent
        evictor.before_eviction(extent)
        bytes_before, start = store.budget.bytes_used, extent.start
        match self.kind:
            case "copy":
                store.set_body(extent, None)
            case "window":
                store.set_window(extent, None, extent.end.position)
                store.prune(extent.end)
            case "snapshot":
                store.set_snapshot(extent.end, None)
                store.prune(extent.end)
            case "extent" | "expired":
                store.remove(extent)
                store.prune(start)
        nbytes = bytes_before - store.budget.bytes_used
        if self.kind not in ("extent", "expired"):
            return Freed(nbytes)
        before = start.arrival
        is_exposed = before is not None and _is_leaf(before) and before.nbytes
        exposed = [_KeptPart(self.kind, before)] if before is not None and is_exposed else []
        return Freed(nbytes, len(extent.tokens), exposed)


def _is_leaf(extent: Extent) -> bool:
    """Whether the extent may go alone: no branch, no request at its end, no rows in a slot."""
    return _is_end(extent) and not extent.holders


def _is_end(extent: Extent) -> bool:
    """Whether the extent has no branch, no pin, and no request at its end."""
    end = extent.end
    return end.arrival is extent and not (end.leaving or end.pins or extent.pinned)


def likelihood(node: PrefixNode, grid: PrefillGrid) -> float:
    """Return how likely a request of the node's line resumes at the node."""
    if node.pins or not (node.leaving or node.is_left_out):
        return TIP
    if node.resumed > 1:
        return TRUNK
    has_parted = node.resumed or len(node.leaving) > 1 or node.is_left_out
    if has_parted or node.is_prompt_end or node.is_in_head:
        return PARTING
    if grid.is_point(node.position):
        return GRID
    assert node.arrival is not None, "nothing is kept at the root"
    line = node.arrival.line
    return NEWEST if node.position > max(line.resumed_at, line.read_to - NEAR) else HEADER


def find_expired(
    store: ExtentStore, standing: Iterable[tuple[PrefixNode, float]], now: float, ttl_s: float
) -> tuple[list[Extent], float]:
    """Return the extents that no line and no slot has used for `ttl_s`, and the next expiry.

    Pinned extents never expire. Children come before their parents, and an extent comes with all
    its descendants. The second value is the time when the next extent expires, or infinity.

    `standing` are the nodes of slots, with each slot's last use. An extent is as young as its
    youngest descendant: a trunk stays as long as any of its branches. A line that waits for
    sub-agents is as young as the sub-agents.
    """
    assert ttl_s > 0, ttl_s
    lines = _used_lines({extent.line for extent in store.extents})
    used_at: dict[Extent, float] = {}
    for node, at in standing:
        if node.arrival is not None:
            used_at[node.arrival] = max(at, used_at.get(node.arrival, -math.inf))
    expired, next_at = [], math.inf
    for extent in sorted(store.extents, key=lambda extent: -extent.end.position):
        is_pinned = extent.pinned or extent.window_pinned or extent.end.snapshot_pinned
        own_use = math.inf if is_pinned or extent.end.pins else lines[extent.line]
        last = max(used_at.get(extent, -math.inf), own_use)
        before = extent.start.arrival
        if before is not None:
            used_at[before] = max(last, used_at.get(before, -math.inf))
        if last + ttl_s <= now:
            expired.append(extent)
        else:
            next_at = min(next_at, last + ttl_s)
    return expired, next_at


def _used_lines(lines: Iterable[LinePriority]) -> dict[LinePriority, float]:
    """Return when each line, or a line that it waits for, was last used."""
    used_at: dict[LinePriority, float] = {}
    for line in lines:
        at = math.inf if line.is_running else line.used_at
        used_at[line] = max(at, used_at.get(line, -math.inf))
        if (waiting := line.sponsor) is not None:
            at = min(at, waiting.ended_at + SPONSOR_SILENT_S)  # the end of the wait
            used_at[waiting] = max(at, used_at.get(waiting, -math.inf))
    return used_at
