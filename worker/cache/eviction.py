"""Evicts kept KV to make room: the cheapest first, never what is worth more than what comes.

Worth is likelihood of need x tokens to prefill again / bytes. Leaf by leaf, so that what is
shared outlives what hangs from it; bytes that a live slot holds too go before all.
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
    path_to,
    runs_from,
    within_window,
)
from hearth.worker.cache.prefill_grid import PrefillGrid

SLACK = 0.02  # share of the budget freed beyond the need, so that sorting is not done each time
LAST_MAX = 32  # entries that made way and are remembered

# How likely a request of a line resumes at a joint, which decides what snapshots and windows stay.
# A snapshot of a big hybrid is as large as the KV of thousands of tokens, and one is taken at every
# cut. Under pressure those go first whose loss costs the fewest tokens for their bytes, so that
# they thin out and the ones below stay.
TIP: Final = 1.0  # where a line goes on
NEWEST: Final = 1.0  # at the last messages of its last prompt: some clients rewrite them each time
TRUNK: Final = 0.2  # where several requests have gone on before
PARTING: Final = 0.1  # where one has, where a turn ended, and amid system and tools
HEADER: Final = 0.05  # at an older message: where an edit would part
GRID: Final = 0.01  # amid a message
NEAR: Final = 2_048  # tokens from the end of a prompt: its last messages


@dataclass(slots=True)
class EvictedEntry:
    """What one entry gave up so far, to make room."""

    line: LinePriority
    root: PrefixNode  # of its prompt: an API key's own, where there are several
    at: float = 0.0  # when it last did, in seconds since the epoch
    parts: Counter[str] = field(default_factory=Counter)  # how many of each kind
    nbytes: int = 0
    tokens: int = 0  # whose rows are in memory no more

    def as_row(self) -> dict[str, object]:
        return {
            "line": self.line.number,
            "at": round(self.at, 3),
            "parts": dict(self.parts),
            "bytes": self.nbytes,
            "tokens": self.tokens,
        }


# What goes first: see docs/cache.md. Parts of one group go by what they are worth.
NEEDLESS, KEPT, LIVE = range(3)
Rank = tuple[float, ...]  # (group, worth, ...): the least goes first


@dataclass(frozen=True, slots=True)
class Gone:
    """What a candidate gave back."""

    nbytes: int
    tokens: int = 0  # whose rows are in memory no more
    exposed: "Sequence[Candidate]" = ()  # what may go now, and could not before
    parts: int = 1
    is_loss: bool = True  # else what a prompt goes on from is kept elsewhere


class Candidate(Protocol):
    """A part of what is held that may go now."""

    @property
    def kind(self) -> str:
        """Its name in reports of evictions."""

    @property
    def run(self) -> Extent | None:
        """The last run of tokens that it serves; None where it is no prompt's."""

    def is_there(self) -> bool:
        """Whether it is still held."""

    def rank(self, evictor: "Evictor", now: float) -> Rank:
        """Return its place in the order in which parts go."""

    def evict(self, evictor: "Evictor") -> Gone:
        """Have it go."""


class Evictor:
    """Has memory freed: the one way out of it, for whatever reason, by one ranking.

    Invariant: what is pinned, and what a running request stands on, stays.
    Owner: the inference thread.
    """

    def __init__(self, store: ExtentStore, chunk: int, ttl_s: float) -> None:
        self.store = store
        self._grid = PrefillGrid(chunk)
        self._ttl_s = ttl_s
        self.evicted: Counter[str] = Counter()  # how many of each kind
        self.evicted_bytes: Counter[str] = Counter()  # and how much they gave back
        # Called with the extent that something of is about to go.
        self.before_eviction: Callable[[Extent], None] = lambda _: None
        # Kept for one key: hashes of what was evicted, for `/v1/cache`
        self._last: OrderedDict[LinePriority, EvictedEntry] = OrderedDict()  # the newest at the end

    @property
    def evictions(self) -> int:
        return self.evicted.total()

    @property
    def last(self) -> list[EvictedEntry]:
        """The entries that made way last, LAST_MAX at most, the newest first."""
        return list(reversed(self._last.values()))

    def make_room(self, nbytes: int, buffers: int, worth: float, now: float) -> bool:
        """Free what `nbytes` in `buffers` need of kept KV's budget; say whether they fit now.

        `worth` is that of what comes (`worth_of`); only what is worth no more goes.
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
        """Have candidates go, the least first, until it is enough; return the bytes that went.

        `is_enough` is asked with the bytes that went, and the rank of the next. Nothing above
        `rank_max` goes, nor a run that is not `among` some.
        """
        order, freed = itertools.count(), 0  # equals go in the order in which they came
        heap = [(each.rank(self, now), next(order), each) for each in candidates]
        heapq.heapify(heap)
        while heap and not is_enough(freed, heap[0][0]):
            last_rank, _, candidate = heapq.heappop(heap)
            if not candidate.is_there():
                continue
            rank = candidate.rank(self, now)
            if rank > last_rank:  # what else it could be resumed from has gone meanwhile
                heapq.heappush(heap, (rank, next(order), candidate))
                continue
            if rank > rank_max:
                break
            run = candidate.run
            entry = self._entry_of(run)  # nobody knows its root once it is gone
            gone = candidate.evict(self)
            assert gone.nbytes >= 0, (candidate.kind, gone)
            for exposed in gone.exposed:
                if among is None or exposed.run in among:
                    heapq.heappush(heap, (exposed.rank(self, now), next(order), exposed))
            freed += gone.nbytes
            if gone.is_loss:
                self._note(candidate.kind, entry, gone)
        return freed

    def _entry_of(self, run: Extent | None) -> EvictedEntry | None:
        """Return what is told of the line that a run is of; that one is now the newest."""
        if run is None:
            return None
        if run.line not in self._last:
            self._last[run.line] = EvictedEntry(run.line, path_to(run.end)[0].start)
        self._last.move_to_end(run.line)
        if len(self._last) > LAST_MAX:
            self._last.popitem(last=False)
        return self._last[run.line]

    def _note(self, kind: str, entry: EvictedEntry | None, gone: Gone) -> None:
        """Count what made way, in all and of its entry."""
        self.evicted[kind] += gone.parts
        self.evicted_bytes[kind] += gone.nbytes
        if entry is not None:
            entry.at = time.time()
            entry.parts[kind] += gone.parts
            entry.nbytes += gone.nbytes
            entry.tokens += gone.tokens

    def worth_of(
        self, line: LinePriority, weight: float, tokens: int, nbytes: int, now: float
    ) -> float:
        """Return what `nbytes` are worth that save `tokens`, needed as `weight` says."""
        return line.likelihood(now, self._ttl_s) * weight * tokens / max(1, nbytes)

    def resume_worth(self, joint: PrefixNode, nbytes: int, now: float) -> float:
        """Return what `nbytes` are worth that allow to resume at `joint`."""
        assert joint.arrival is not None, "nothing is kept at the root"
        weight = likelihood(joint, self._grid)
        tokens = joint.position - self._resumable_to(joint.arrival.start)
        return self.worth_of(joint.arrival.line, weight, tokens, nbytes, now)

    def window_worth(self, extent: Extent, nbytes: int, now: float) -> float:
        """Return what window rows are worth: what is read again once they have gone.

        To resume somewhere takes all rows of the window before it, of several extents often. Where
        some of them have gone the others save nothing. What prompts that part from the line up to
        the next such place would read again counts too, so that places thin out evenly.
        """
        window, worth, todo = self.store.layout.window, 0.0, [extent.end]
        before = self._resumable_to(extent.start)
        while todo:
            joint = todo.pop()
            is_tip = not joint.leaving or joint.pins  # what it lacks may be on disk
            if is_tip or self._is_resumable(joint):
                assert joint.arrival is not None, "windows are of extents"
                weight, tokens = likelihood(joint, self._grid), self._next_after(joint) - before
                line = joint.arrival.line
                worth = max(worth, self.worth_of(line, weight, tokens, nbytes, now))
            later = (run.end for run in joint.leaving)
            todo += [end for end in later if end.position - window < extent.end.position]
        return worth

    def leaf_worth(self, extent: Extent, nbytes: int, now: float) -> float:
        """Return what the bytes of a leaf are worth."""
        # Where nobody can go on from its end, its rows save nothing any more.
        is_of_use = self._is_resumable(extent.end)
        return self.resume_worth(extent.end, nbytes, now) if is_of_use else 0.0

    def likelihoods_from(self, extent: Extent, now: float) -> dict[Extent, float]:
        """Return how likely each extent from here on is needed, by any line that goes through."""
        likelihoods: dict[Extent, float] = {}
        for one in reversed([*runs_from(extent)]):  # children before their parents
            beyond = (likelihoods[later] for later in one.end.leaving)
            likelihoods[one] = max([one.line.likelihood(now, self._ttl_s), *beyond])
        return likelihoods

    def _resumable_to(self, joint: PrefixNode) -> int:
        """Return the last position up to `joint` where a prompt can be resumed."""
        while joint.arrival is not None and not self._is_resumable(joint):
            joint = joint.arrival.start
        return joint.position

    def _next_after(self, joint: PrefixNode) -> int:
        """Return the first position behind `joint` where a prompt can be resumed, or the end."""
        position, todo = joint.position, [run.end for run in joint.leaving]
        while todo:
            joint = todo.pop()
            position = max(position, joint.position)
            if self._is_resumable(joint):
                return joint.position
            todo += [run.end for run in joint.leaving]
        return position

    def _is_resumable(self, joint: PrefixNode) -> bool:
        """Whether the layers could be resumed here: with a state, and with the whole window."""
        layout = self.store.layout
        if layout.has_state and joint.snapshot is None:
            return False
        back_to = max(0, joint.position - layout.window)
        near = within_window(joint, layout.window)
        return all(extent.window_covers(back_to) for extent in near)

    def expired(self, among: Iterable[Extent]) -> "list[Candidate]":
        """Return the runs that may go for their age, with what is at their ends.

        Slots may have their rows too, beside the paths on which they stand.
        """
        return [_KeptPart("expired", extent) for extent in among if _is_end(extent)]

    def kept_parts(self) -> "list[Candidate]":
        """Return what of the store may go now."""
        runs, found = list(self.store.extents), list[Candidate]()
        for run in runs:
            if run.body is not None and run.holders and not run.pinned:
                found.append(_KeptPart("copy", run))
            if run.window is not None and not run.window_pinned:
                found.append(_KeptPart("window", run))
            if _is_leaf(run) and run.nbytes:
                found.append(_KeptPart("extent", run))
        ends = [run for run in runs if run.end.snapshot is not None and not run.end.snapshot_pinned]
        return [*found, *(_KeptPart("snapshot", run) for run in ends)]


@dataclass(frozen=True, slots=True)
class _KeptPart:
    """A part of an extent's kept KV.

    A "copy" is of rows that a slot holds too, and costs nothing to give up; a "window" its window
    rows; a "snapshot" what is at its end; the "extent" all of it, where nothing hangs from it;
    "expired" the same, for its age.
    """

    kind: Literal["copy", "window", "snapshot", "extent", "expired"]
    run: Extent

    def is_there(self) -> bool:
        run = self.run
        match self.kind:
            case "copy":
                return run.body is not None and bool(run.holders)
            case "window":
                return run.window is not None
            case "snapshot":
                return run.end.snapshot is not None
        return _is_end(run) if self.kind == "expired" else _is_leaf(run)

    def rank(self, evictor: Evictor, now: float) -> Rank:
        run, snapshot = self.run, self.run.end.snapshot
        state_bytes = snapshot.nbytes if snapshot is not None else 0
        match self.kind:
            case "copy":
                return KEPT, 0.0
            case "window":
                assert run.window is not None
                return KEPT, evictor.window_worth(run, run.window.nbytes, now)
            case "snapshot":
                return KEPT, evictor.resume_worth(run.end, state_bytes, now)
        return KEPT, evictor.leaf_worth(run, run.nbytes + state_bytes, now)

    def evict(self, evictor: Evictor) -> Gone:
        store, run = evictor.store, self.run
        evictor.before_eviction(run)
        held, start = store.budget.bytes_used, run.start
        match self.kind:
            case "copy":
                store.set_body(run, None)
            case "window":
                store.set_window(run, None, run.end.position)
                store.prune(run.end)
            case "snapshot":
                store.set_snapshot(run.end, None)
                store.prune(run.end)
            case "extent" | "expired":
                store.remove(run)
                store.prune(start)
        freed = held - store.budget.bytes_used
        if self.kind not in ("extent", "expired"):
            return Gone(freed)
        before = start.arrival
        is_exposed = before is not None and _is_leaf(before) and before.nbytes
        exposed = [_KeptPart(self.kind, before)] if before is not None and is_exposed else []
        return Gone(freed, len(run.tokens), exposed)


def _is_leaf(extent: Extent) -> bool:
    """Whether it may go and nothing else is lost with it: no branch, no request, no slot's rows."""
    return _is_end(extent) and not extent.holders


def _is_end(extent: Extent) -> bool:
    """Whether nothing hangs from it: no branch, and no request stands at its end."""
    end = extent.end
    return end.arrival is extent and not (end.leaving or end.pins or extent.pinned)


def likelihood(joint: PrefixNode, grid: PrefillGrid) -> float:
    """Return how likely a request of the line resumes here."""
    if joint.pins or not (joint.leaving or joint.is_left_out):
        return TIP
    if joint.resumed > 1:
        return TRUNK
    has_parted = joint.resumed or len(joint.leaving) > 1 or joint.is_left_out
    if has_parted or joint.is_prompt_end or joint.is_in_head:
        return PARTING
    if grid.is_point(joint.position):
        return GRID
    assert joint.arrival is not None, "nothing is kept at the root"
    line = joint.arrival.line
    return NEWEST if joint.position > max(line.resumed_at, line.read_to - NEAR) else HEADER


def find_expired(
    store: ExtentStore, standing: Iterable[tuple[PrefixNode, float]], now: float, ttl_s: float
) -> tuple[list[Extent], float]:
    """Return the extents that no line and no slot has used for `ttl_s`; none that is pinned.

    They come children before their parents, and what hangs from one is among them. With them comes
    before when nothing else expires; infinity where nothing will.

    `standing` are the joints at which slots stand, with when each was used. An extent is as
    young as the youngest that hangs from it: a trunk stays as long as one of its branches. A line
    that waits for its sub-agents is as young as they are.
    """
    assert ttl_s > 0, ttl_s
    lines = _used_lines({extent.line for extent in store.extents})
    used_at: dict[Extent, float] = {}
    for joint, at in standing:
        if joint.arrival is not None:
            used_at[joint.arrival] = max(at, used_at.get(joint.arrival, -math.inf))
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
    """Return when each line was used last, itself or by those that it waits for."""
    used_at: dict[LinePriority, float] = {}
    for line in lines:
        at = math.inf if line.is_running else line.used_at
        used_at[line] = max(at, used_at.get(line, -math.inf))
        if (waiting := line.sponsor) is not None:
            at = min(at, waiting.ended_at + SPONSOR_SILENT_S)  # then it waits for nobody
            used_at[waiting] = max(at, used_at.get(waiting, -math.inf))
    return used_at
