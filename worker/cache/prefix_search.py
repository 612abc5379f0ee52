"""Finds how far a prompt can be resumed from what is kept, and plans from where it goes on.

The search decides nothing about slots or bytes. A plan is a value; worker/kv/ carries it out. What
the prompt means for the line of its conversation is told here, too.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final

from hearth.worker.cache.block_hash import PrefixHash, Tokens, common_length
from hearth.worker.cache.conversation_priority import (
    UNKNOWN,
    Conversation,
    LinePriorities,
    LinePriority,
)
from hearth.worker.cache.extent_store import (
    Extent,
    ExtentStore,
    PrefixNode,
    path_to,
    runs_from,
    same_tokens,
    within_window,
)
from hearth.worker.cache.image_keys import ImageRun, is_inside

KINDS = ("exact", "prefix", "supersequence", "lcp", "miss")

# Tokens that resuming amid a forward must save: all that is read behind that place is fast for
# good, and what it saves is kept as a run of its own, in RAM and on disk.
INSIDE_TOKENS_MIN: Final = 32


@dataclass(eq=False, slots=True)
class PrefixQuery:
    """A prompt as the cache sees it: its tokens, and where its prefill is cut.

    Where it shows images, `tokens` are its keys (worker/cache/image_keys.py). Nothing of it changes
    but `plan`, which the inference thread keeps here.
    """

    tokens: Tokens
    cuts: Sequence[int]  # ascending; what is behind the last is fed in one forward for its logits
    names: Sequence[PrefixHash]  # of the prefix up to each cut
    conversation: Conversation = UNKNOWN
    root: PrefixHash | None = None  # what `names` begin with; None = the model's own
    images: tuple[ImageRun, ...] = ()  # ascending
    system_end: int = 0  # where system and tools end, a cut; 0 = nowhere
    adapter: str = ""  # that its forwards are computed with, "" = none. Each has its own root
    plan: "ResumePlan | None" = field(default=None, init=False, repr=False)  # the last one of it

    def __post_init__(self) -> None:
        assert len(self.cuts) == len(self.names), (len(self.cuts), len(self.names))
        assert 0 <= self.limit <= len(self.tokens), (self.limit, len(self.tokens))

    @property
    def limit(self) -> int:
        """The furthest position at which this prompt can be resumed."""
        return self.cuts[-1] if self.cuts else 0


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The furthest place to resume at, and how it is reached.

    `path` leads there from the root; its last extent may reach further than `position`.
    """

    position: int
    path: tuple[Extent, ...]
    is_canonical: bool
    matched: int  # tokens that the prompt shares with anything kept
    is_diverging: bool  # what is kept goes on behind `matched`, with other tokens
    is_prompt: bool  # the prompt is, to its last cut, one that was prefilled before
    reached: Mapping[PrefixNode, bool]  # prefixes of the prompt that are kept: whether canonically
    version: object  # of the store that was searched


class PrefixSearch:
    """One lookup. `is_exact` allows canonical extents only.

    Costs one dictionary lookup a cut, and one comparison for each branch that leaves the path.
    """

    def __init__(self, store: ExtentStore, query: PrefixQuery, is_exact: bool) -> None:
        self._store = store
        self._root = store.root_of(query.root)
        self._query = query
        self._is_exact = is_exact
        self._reached = {self._root: True}  # whether over canonical extents only
        self._partial: list[tuple[int, Extent]] = []  # (tokens matched to, extent left there)
        self._diverges_at = -1  # the furthest position at which kept tokens differ
        self._by_cut = dict(zip(query.cuts, query.names, strict=True))

    def run(self) -> FoundPrefix:
        last = self._walk_canonical()
        if self._is_exact:
            for extent in last.leaving:
                self._leave(extent)
        else:
            self._walk_all()
        matched = max(joint.position for joint in self._reached)
        deepest = max([matched, *(position for position, _ in self._partial)])
        is_diverging = self._diverges_at == deepest
        end = self._store.joint(self._query.names[-1]) if self._query.names else None
        is_prompt = end is not None and end.is_prompt_end and end in self._reached
        facts = (deepest, is_diverging, is_prompt, self._reached, self._store.version)
        for position, is_canonical, joint, part in self._candidates():
            path = self._resumable(position, joint, part)
            if path is not None:
                return FoundPrefix(position, path, is_canonical, *facts)
        return FoundPrefix(0, (), True, *facts)

    def _walk_canonical(self) -> PrefixNode:
        """Go from cut to cut as far as there are canonical extents; return the last joint."""
        joint = self._root
        for name in self._query.names:
            found = self._store.joint(name)
            extent = found.arrival if found is not None else None
            if extent is None or not extent.is_canonical or extent.start is not joint:
                break
            joint = extent.end
            self._reached[joint] = True
        return joint

    def _walk_all(self) -> None:
        """Go along every extent whose tokens are the prompt's."""
        todo = list(self._reached)
        while todo:
            joint = todo.pop()
            for extent in joint.leaving:
                if extent.end in self._reached:
                    continue
                if self._matches(extent):
                    self._reached[extent.end] = False
                    todo.append(extent.end)
                    if extent.end.position > self._query.limit:
                        self._partial.append((extent.end.position, extent))
                else:
                    self._leave(extent)

    def _matches(self, extent: Extent) -> bool:
        end = extent.end.position
        name = self._by_cut.get(end)
        if name is not None:
            return extent.end.name == name
        return end <= len(self._query.tokens) and same_tokens(extent, self._query.tokens)

    def _leave(self, extent: Extent) -> None:
        start = extent.start.position
        shared = common_length(extent.tokens, self._query.tokens[start:])
        self._partial.append((start + shared, extent))
        if shared < len(extent.tokens) and start + shared < len(self._query.tokens):
            self._diverges_at = max(self._diverges_at, start + shared)

    def _candidates(self) -> Iterator[tuple[int, bool, PrefixNode, Extent | None]]:
        """Yield (position, is canonical, joint, extent begun there), the best first."""
        limit = self._query.limit
        rows: list[tuple[int, bool, PrefixNode, Extent | None]] = [
            (joint.position, is_canonical and not joint.is_snapshot_fast, joint, None)
            for joint, is_canonical in self._reached.items()
            if 0 < joint.position <= limit
        ]
        if not self._is_exact and self._store.layout.resumes_anywhere:
            rows += [
                (min(position, limit), False, extent.start, extent)
                for position, extent in self._partial
                if self._can_leave(extent, min(position, limit))
            ]
        yield from sorted(rows, key=lambda row: row[:2], reverse=True)

    def _can_leave(self, extent: Extent, position: int) -> bool:
        """Whether the prompt may go on from `position` within an extent.

        Generated text is fast anyway. What a prefill wrote in one forward is left behind the end of
        system and tools only: other conversations begin with what stands before that.
        """
        saved = position - extent.start.position
        if not extent.is_canonical:
            return saved > 0
        is_own = position > self._query.system_end > 0
        return is_own and saved >= INSIDE_TOKENS_MIN and not is_inside(self._query.tokens, position)

    def _resumable(
        self, position: int, joint: PrefixNode, part: Extent | None
    ) -> tuple[Extent, ...] | None:
        """Return the path to `position`, or None where the layers lack what they need there."""
        layout = self._store.layout
        if layout.has_state and joint.snapshot is None:
            return None
        if self._is_exact and joint.is_snapshot_fast:
            return None
        back_to = position - layout.window
        near = within_window(joint, joint.position - back_to) if layout.window else ()
        if not all(extent.window_covers(back_to) for extent in near):
            return None
        path = path_to(joint)
        return tuple(path if part is None else [*path, part])


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True, slots=True)
class SlotView:
    """An idle live slot, as the planner sees it: the tokens that its layers hold."""

    number: int
    tokens: Tokens  # all that is in its layers
    canonical_cuts: tuple[int, ...]  # of its canonical prefill, which ends at the last
    floor: int = 0  # it cannot be taken back further than this
    root: PrefixHash | None = None  # whose it is; None = the model's own


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """Where a request resumes, and from what.

    kind: how the prompt relates to what is kept (KINDS). `hybrid_trimmed` says that rows were
    kept further than the layers' states and windows allow to resume, `is_retreat` that it is cold
    because it would go on amid an image. It is good while the store's version is that of `found`,
    and while its slot is there.
    """

    position: int  # prompt tokens that need not be prefilled
    is_canonical: bool  # what the request adds by prefill is canonical
    path: tuple[Extent, ...]  # to `position`; empty when a slot's tip is continued
    slot: int | None  # go on in this slot, without a copy
    kind: str
    matched: int
    hybrid_trimmed: bool
    is_retreat: bool = False
    found: FoundPrefix | None = None  # that it was made from

    def __post_init__(self) -> None:
        assert 0 <= self.position <= self.matched, (self.position, self.matched)
        if self.path:
            last = self.path[-1]
            assert last.start.position < self.position <= last.end.position, self.position

    @classmethod
    def cold(cls, found: FoundPrefix | None = None, *, is_retreat: bool = False) -> "ResumePlan":
        """The plan that goes on from nothing."""
        return cls(0, True, (), None, "miss", 0, False, is_retreat, found)

    @property
    def source(self) -> str:
        if self.position == 0:
            return "none"
        return "slot" if self.slot is not None else "ram"


def make_plan(
    store: ExtentStore, slots: Iterable[SlotView], query: PrefixQuery, is_exact: bool
) -> ResumePlan:
    """Return the plan that leaves the fewest tokens to prefill; a slot where one is as good."""
    found = PrefixSearch(store, query, is_exact).run()
    plan = choose_slot(found, store, slots, query, is_exact)
    if is_inside(query.tokens, plan.position):
        return ResumePlan.cold(found, is_retreat=True)
    return plan


def choose_slot(
    found: FoundPrefix,
    store: ExtentStore,
    slots: Iterable[SlotView],
    query: PrefixQuery,
    is_exact: bool,
) -> ResumePlan:
    """Return the plan that goes on from what was found, or further on in one of `slots`."""
    # Whether states or windows, not tokens, decide how far the prompt is resumed:
    wanted = max((cut for cut in query.cuts if cut <= found.matched), default=0)
    is_trimmed = not store.layout.resumes_anywhere and found.position < wanted
    best = ResumePlan(
        position=found.position,
        is_canonical=found.is_canonical,
        path=found.path,
        slot=None,
        kind=_kind(found, query, found.position),
        matched=found.matched,
        hybrid_trimmed=is_trimmed,
        found=found,
    )
    ranked = []
    root = store.root_of(query.root)
    for slot in slots:
        if store.root_of(slot.root) is not root:
            continue
        shared = common_length(slot.tokens, query.tokens)
        # Up to where it holds what a prefill of this very prompt would have written:
        cuts = shared_cuts(slot.canonical_cuts, query.cuts)
        canonical = max((cut for cut in cuts if cut <= shared), default=0)
        tip = len(slot.tokens)
        if _continues(tip, canonical, shared, query, is_exact) and tip >= best.position:
            ranked.append(((tip, True, canonical == tip, 0), slot))
        elif _rewinds(best, slot, shared, canonical):
            ranked.append(((best.position, False, best.is_canonical, best.position - tip), slot))
    if not ranked:
        return best
    (position, is_tip, is_canonical, _), slot = max(ranked, key=lambda row: row[0])
    return replace(
        best,
        position=position,
        is_canonical=is_canonical,
        path=() if is_tip else best.path,
        slot=slot.number,
        kind=_kind(found, query, position),
        matched=max(best.matched, position),
        hybrid_trimmed=best.hybrid_trimmed and position == best.position,
    )


def _continues(tip: int, canonical: int, shared: int, query: PrefixQuery, is_exact: bool) -> bool:
    """Whether the prompt goes on behind all that the slot holds, and not amid an image."""
    is_within = 0 < tip <= min(shared, query.limit) and not is_inside(query.tokens, tip)
    return is_within and (not is_exact or canonical == tip)


def _rewinds(best: ResumePlan, slot: SlotView, shared: int, canonical: int) -> bool:
    """Whether to go back in the slot rather than copy what is kept into another.

    Not where more would be cut off than copied: then the slot is rather someone else's.
    """
    position = best.position
    holds = canonical if best.is_canonical else shared
    cut_off = len(slot.tokens) - position
    return max(1, slot.floor) <= position <= holds and cut_off <= position


def shared_cuts(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the cuts that both begin with."""
    same = takewhile(lambda cuts: cuts[0] == cuts[1], zip(one, other, strict=False))
    return [cut for cut, _ in same]


def _kind(found: FoundPrefix, query: PrefixQuery, position: int) -> str:
    if position == 0:
        return "miss"
    if found.matched >= query.limit:
        return "exact" if found.is_prompt else "supersequence"
    return "lcp" if found.is_diverging else "prefix"


# ---------------------------------------------------------------- the conversation's line


def line_of(
    store: ExtentStore,
    lines: LinePriorities,
    plan: ResumePlan,
    query: PrefixQuery,
    there: LinePriority | None,
) -> LinePriority:
    """Begin a turn of the line of the prompt's conversation, and return it.

    That is the line of what it goes on from: of its own number or, in its family, of whose last
    prompt it has all (the sessions are not told of raw prompts, nor of those that were broken off).
    Where nothing is left of such a line it begins anew. `there` is the line of the slot that it
    goes on in, if it does.
    """
    asked, turns = query.conversation, 1 + sum(extent.end.is_prompt_end for extent in plan.path)
    if plan.path:
        last = plan.path[-1].line
        tip = store.tip_of(last)
        is_its = tip is not None and (_has(tip, plan) or last.number == asked.number != 0)
        there = last if is_its else None
    if there is None or there.is_running or there.family != asked.family:
        return lines.open(time.monotonic(), turns, asked)
    lines.go_on(there, time.monotonic(), turns)
    if plan.path:  # else the prompt has all that its slot holds
        _leave_out_end(store, there, plan)
    return there


def _leave_out_end(store: ExtentStore, line: LinePriority, plan: ResumePlan) -> None:
    """Note what a prompt that goes on with the line leaves out of what it last read.

    Some clients send the last messages of a prompt otherwise in the next one. Nobody goes on from
    what was read of such an end: kept as if somebody did, it pushes out what the next prompt goes
    on from.
    """
    tip = store.tip_of(line)
    if tip is None or _has(tip, plan):
        return
    assert tip.arrival is not None, "a prompt's last cut is behind the root"
    for extent in runs_from(tip.arrival):
        extent.end.is_left_out = True
    line.tip = None


def take_over_path(
    line: LinePriority, plan: ResumePlan, query: PrefixQuery, now: float, ttl_s: float
) -> None:
    """Give the extents that are resumed from to the line, unless a likelier one has them.

    What came from disk is not known yet as system and tools.
    """
    mine = line.likelihood(now, ttl_s)
    for extent in plan.path:
        if extent.line.likelihood(now, ttl_s) <= mine:
            extent.line = line
        extent.end.is_in_head |= extent.end.position <= query.system_end
        extent.end.is_left_out = False
    line.resumed_at, line.read_to = plan.position, len(query.tokens)


def _has(tip: PrefixNode, plan: ResumePlan) -> bool:
    """Whether the prompt has all that ends at `tip`."""
    return tip.position <= plan.position and tip.arrival in plan.path
