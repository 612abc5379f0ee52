"""Plans where a request resumes, and finds the line of its conversation.

A plan is a value; worker/kv/ carries it out.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from hearth.worker.cache.block_hash import PrefixHash, Tokens, common_length
from hearth.worker.cache.conversation_priority import LinePriorities, LinePriority
from hearth.worker.cache.extent_store import Extent, ExtentStore, Joint, runs_from
from hearth.worker.cache.image_keys import is_inside
from hearth.worker.cache.prefix_search import FoundPrefix, PrefixQuery, PrefixSearch

KINDS = ("exact", "prefix", "supersequence", "lcp", "miss")


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


def _has(tip: Joint, plan: ResumePlan) -> bool:
    """Whether the prompt has all that ends at `tip`."""
    return tip.position <= plan.position and tip.arrival in plan.path
