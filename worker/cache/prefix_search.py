"""Finds how much of a prompt is kept, plans where the prompt resumes, and updates its line.

The search decides nothing about slots or bytes. A plan is a value that worker/kv/ carries out.
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
    extents_from,
    path_to,
    same_tokens,
    within_window,
)
from hearth.worker.cache.image_keys import ImageRun, is_inside

KINDS = ("exact", "prefix", "supersequence", "lcp", "miss")

# Least tokens that a resume within a forward must save. The price of such a resume: all later KV
# stays fast, and the saved tokens become an extent of their own, in RAM and on disk.
INSIDE_TOKENS_MIN: Final = 32


@dataclass(eq=False, slots=True)
class PrefixQuery:
    """A prompt as the cache sees it: its tokens, and where its prefill is cut.

    With images, `tokens` are keys (worker/cache/image_keys.py). Only `plan` ever changes; the
    inference thread sets it.
    """

    tokens: Tokens
    cuts: Sequence[int]  # ascending; a last forward reads the tokens after the last cut
    names: Sequence[PrefixHash]  # hash of the prefix up to each cut
    conversation: Conversation = UNKNOWN
    root: PrefixHash | None = None  # name of the empty prefix; None = the model's own
    images: tuple[ImageRun, ...] = ()  # ascending
    system_end: int = 0  # the cut at the end of system and tools; 0 = no such cut
    adapter: str = ""  # adapter of the forwards, with a root of its own; "" = none
    plan: "ResumePlan | None" = field(default=None, init=False, repr=False)  # last plan

    def __post_init__(self) -> None:
        assert len(self.cuts) == len(self.names), (len(self.cuts), len(self.names))
        assert 0 <= self.limit <= len(self.tokens), (self.limit, len(self.tokens))

    @property
    def limit(self) -> int:
        """The last position at which this prompt can resume."""
        return self.cuts[-1] if self.cuts else 0


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The last position at which a prompt can resume, and the path to it.

    `path` begins at the root; its last extent may end after `position`.
    """

    position: int
    path: tuple[Extent, ...]
    is_canonical: bool
    matched: int  # tokens that the prompt shares with any kept prompt
    is_diverging: bool  # whether a kept prompt continues after `matched` with other tokens
    is_prompt: bool  # whether an earlier prompt ended at this prompt's last cut
    reached: Mapping[PrefixNode, bool]  # kept prefixes of the prompt; True = canonical
    version: object  # version of the searched store


class PrefixSearch:
    """One search for a prompt. `is_exact` allows canonical extents only.

    A search costs one dictionary lookup per cut, and one comparison per branch off the path.
    """

    def __init__(self, store: ExtentStore, query: PrefixQuery, is_exact: bool) -> None:
        self._store = store
        self._root = store.root_of(query.root)
        self._query = query
        self._is_exact = is_exact
        self._reached = {self._root: True}  # node -> whether the path to it is canonical
        self._partial: list[tuple[int, Extent]] = []  # (end of a match, extent around the end)
        self._diverges_at = -1  # last position at which kept tokens differ from the prompt's
        self._by_cut = dict(zip(query.cuts, query.names, strict=True))

    def run(self) -> FoundPrefix:
        last = self._walk_canonical()
        if self._is_exact:
            for extent in last.leaving:
                self._match_part(extent)
        else:
            self._walk_all()
        matched = max(node.position for node in self._reached)
        deepest = max([matched, *(position for position, _ in self._partial)])
        is_diverging = self._diverges_at == deepest
        end = self._store.node(self._query.names[-1]) if self._query.names else None
        is_prompt = end is not None and end.is_prompt_end and end in self._reached
        facts = (deepest, is_diverging, is_prompt, self._reached, self._store.version)
        for position, is_canonical, node, part in self._candidates():
            path = self._path_if_resumable(position, node, part)
            if path is not None:
                return FoundPrefix(position, path, is_canonical, *facts)
        return FoundPrefix(0, (), True, *facts)

    def _walk_canonical(self) -> PrefixNode:
        """Follow canonical extents from cut to cut; return the last node."""
        node = self._root
        for name in self._query.names:
            found = self._store.node(name)
            extent = found.arrival if found is not None else None
            if extent is None or not extent.is_canonical or extent.start is not node:
                break
            node = extent.end
            self._reached[node] = True
        return node

    def _walk_all(self) -> None:
        """Follow every extent with the prompt's tokens."""
        todo = list(self._reached)
        while todo:
            node = todo.pop()
            for extent in node.leaving:
                if extent.end in self._reached:
                    continue
                if self._matches(extent):
                    self._reached[extent.end] = False
                    todo.append(extent.end)
                    if extent.end.position > self._query.limit:
                        self._partial.append((extent.end.position, extent))
                else:
                    self._match_part(extent)

    def _matches(self, extent: Extent) -> bool:
        end = extent.end.position
        name = self._by_cut.get(end)
        if name is not None:
            return extent.end.name == name
        return end <= len(self._query.tokens) and same_tokens(extent, self._query.tokens)

    def _match_part(self, extent: Extent) -> None:
        start = extent.start.position
        shared = common_length(extent.tokens, self._query.tokens[start:])
        self._partial.append((start + shared, extent))
        if shared < len(extent.tokens) and start + shared < len(self._query.tokens):
            self._diverges_at = max(self._diverges_at, start + shared)

    def _candidates(self) -> Iterator[tuple[int, bool, PrefixNode, Extent | None]]:
        """Yield (position, is canonical, node, extent from node to position), best first."""
        limit = self._query.limit
        candidates: list[tuple[int, bool, PrefixNode, Extent | None]] = [
            (node.position, is_canonical and not node.is_snapshot_fast, node, None)
            for node, is_canonical in self._reached.items()
            if 0 < node.position <= limit
        ]
        if not self._is_exact and self._store.layout.resumes_anywhere:
            candidates += [
                (min(position, limit), False, extent.start, extent)
                for position, extent in self._partial
                if self._can_resume_within(extent, min(position, limit))
            ]
        yield from sorted(candidates, key=lambda candidate: candidate[:2], reverse=True)

    def _can_resume_within(self, extent: Extent, position: int) -> bool:
        """Whether the prompt may resume at `position` within an extent.

        A fast extent may always be left. A canonical extent may be left only after the end of
        system and tools: other conversations share the KV before that end, which stays canonical.
        """
        saved = position - extent.start.position
        if not extent.is_canonical:
            return saved > 0
        is_own = position > self._query.system_end > 0
        return is_own and saved >= INSIDE_TOKENS_MIN and not is_inside(self._query.tokens, position)

    def _path_if_resumable(
        self, position: int, node: PrefixNode, part: Extent | None
    ) -> tuple[Extent, ...] | None:
        """Return the path to `position`; None where the layers cannot resume there."""
        layout = self._store.layout
        if layout.has_state and node.snapshot is None:
            return None
        if self._is_exact and node.is_snapshot_fast:
            return None
        back_to = position - layout.window
        near = within_window(node, node.position - back_to) if layout.window else ()
        if not all(extent.window_covers(back_to) for extent in near):
            return None
        path = path_to(node)
        return tuple(path if part is None else [*path, part])


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True, slots=True)
class SlotView:
    """An idle live slot as the planner sees it."""

    number: int
    tokens: Tokens  # all tokens in the slot's layers
    canonical_cuts: tuple[int, ...]  # cuts of the canonical prefill, which ends at the last cut
    floor: int = 0  # lowest position to which the slot can be rewound
    root: PrefixHash | None = None  # name of the slot's root; None = the model's own


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """Where a request resumes, and from which extents or slot.

    `kind` says how the prompt relates to kept prompts (KINDS). `hybrid_trimmed`: more rows are kept
    than states and windows allow to reuse. `is_retreat`: the plan is cold because the prompt would
    resume within an image. A plan is valid while the store has the version of `found` and the
    plan's slot exists.
    """

    position: int  # prompt tokens that need no prefill
    is_canonical: bool  # whether the request's prefill will write canonical KV
    path: tuple[Extent, ...]  # from the root to `position`; empty if the slot continues at its end
    slot: int | None  # slot that the request continues in, without a copy
    kind: str
    matched: int
    hybrid_trimmed: bool
    is_retreat: bool = False
    found: FoundPrefix | None = None  # the search that the plan was made from

    def __post_init__(self) -> None:
        assert 0 <= self.position <= self.matched, (self.position, self.matched)
        if self.path:
            last = self.path[-1]
            assert last.start.position < self.position <= last.end.position, self.position

    @classmethod
    def cold(cls, found: FoundPrefix | None = None, *, is_retreat: bool = False) -> "ResumePlan":
        """Return the plan that reuses nothing."""
        return cls(0, True, (), None, "miss", 0, False, is_retreat, found)

    @property
    def source(self) -> str:
        if self.position == 0:
            return "none"
        return "slot" if self.slot is not None else "ram"


def make_plan(
    store: ExtentStore, slots: Iterable[SlotView], query: PrefixQuery, is_exact: bool
) -> ResumePlan:
    """Return the plan with the fewest tokens to prefill; among equal plans, one with a slot."""
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
    """Return the plan that resumes from the found prefix, or from a slot if that is better."""
    # The last cut at which the prompt would resume if states and windows did not limit that:
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
        # The slot's KV up to `canonical` is what a prefill of this prompt would write:
        cuts = shared_cuts(slot.canonical_cuts, query.cuts)
        canonical = max((cut for cut in cuts if cut <= shared), default=0)
        tip = len(slot.tokens)
        if _continues(tip, canonical, shared, query, is_exact) and tip >= best.position:
            ranked.append(((tip, True, canonical == tip, 0), slot))
        elif _rewinds(best, slot, shared, canonical):
            ranked.append(((best.position, False, best.is_canonical, best.position - tip), slot))
    if not ranked:
        return best
    (position, is_tip, is_canonical, _), slot = max(ranked, key=lambda entry: entry[0])
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
    """Whether the prompt begins with all of the slot's tokens and can resume after them."""
    is_within = 0 < tip <= min(shared, query.limit) and not is_inside(query.tokens, tip)
    return is_within and (not is_exact or canonical == tip)


def _rewinds(best: ResumePlan, slot: SlotView, shared: int, canonical: int) -> bool:
    """Whether to rewind the slot rather than copy kept KV into another slot.

    A slot that would lose more tokens than a copy has is left to the slot's own conversation.
    """
    position = best.position
    usable = canonical if best.is_canonical else shared
    lost = len(slot.tokens) - position
    return max(1, slot.floor) <= position <= usable and lost <= position


def shared_cuts(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the cuts at the beginning that are the same in both."""
    same = takewhile(lambda cuts: cuts[0] == cuts[1], zip(first, second, strict=False))
    return [cut for cut, _ in same]


def _kind(found: FoundPrefix, query: PrefixQuery, position: int) -> str:
    if position == 0:
        return "miss"
    if found.matched >= query.limit:
        return "exact" if found.is_prompt else "supersequence"
    return "lcp" if found.is_diverging else "prefix"


# ---------------------------------------------------------------- the conversation's line


def line_for(
    store: ExtentStore,
    lines: LinePriorities,
    plan: ResumePlan,
    query: PrefixQuery,
    slot_line: LinePriority | None,
) -> LinePriority:
    """Begin a request of the line that the prompt continues, or of a new line; return the line.

    A prompt continues the line of the last extent that is reused, if that line has the prompt's
    conversation number, or if the prompt contains the line's last prompt (the session store does
    not know raw and aborted prompts). The line must be idle and of the same family.
    `slot_line` is the line of the plan's slot, if the plan has a slot.
    """
    conversation, turns = query.conversation, 1 + sum(e.end.is_prompt_end for e in plan.path)
    if plan.path:
        last = plan.path[-1].line
        tip = store.tip_of(last)
        is_same_line = tip is not None and (
            _contains(tip, plan) or last.number == conversation.number != 0
        )
        slot_line = last if is_same_line else None
    if slot_line is None or slot_line.is_running or slot_line.family != conversation.family:
        return lines.open(time.monotonic(), turns, conversation)
    lines.begin_request(slot_line, time.monotonic(), turns)
    if plan.path:  # without a path, the prompt contains all of the slot's tokens
        _mark_left_out(store, slot_line, plan)
    return slot_line


def _mark_left_out(store: ExtentStore, line: LinePriority, plan: ResumePlan) -> None:
    """Mark the end of the line's last prompt that the next prompt does not contain.

    Some clients rewrite the last messages of a prompt in the next prompt. No prompt resumes from
    the rewritten end, so KV of this end must not evict the KV that the next prompt resumes from.
    """
    tip = store.tip_of(line)
    if tip is None or _contains(tip, plan):
        return
    assert tip.arrival is not None, "the line's last prompt ends at the root"
    for extent in extents_from(tip.arrival):
        extent.end.is_left_out = True
    line.tip = None


def take_over_path(
    line: LinePriority, plan: ResumePlan, query: PrefixQuery, now: float, ttl_s: float
) -> None:
    """Give the plan's extents to the line, except extents of a line more likely to continue.

    Nodes up to the end of system and tools are marked again: nodes from disk have no mark yet.
    """
    likelihood = line.likelihood(now, ttl_s)
    for extent in plan.path:
        if extent.line.likelihood(now, ttl_s) <= likelihood:
            extent.line = line
        extent.end.is_in_head |= extent.end.position <= query.system_end
        extent.end.is_left_out = False
    line.resumed_at, line.read_to = plan.position, len(query.tokens)


def _contains(tip: PrefixNode, plan: ResumePlan) -> bool:
    """Whether the plan's path contains all tokens up to `tip`."""
    return tip.position <= plan.position and tip.arrival in plan.path
