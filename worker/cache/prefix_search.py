"""Finds how far a prompt can be resumed from what is kept. Decides nothing about slots or bytes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from hearth.worker.cache.block_hash import PrefixHash, Tokens, common_length
from hearth.worker.cache.conversation_priority import UNKNOWN, Conversation
from hearth.worker.cache.extent_store import Extent, ExtentStore, Joint, same_tokens
from hearth.worker.cache.image_keys import ImageRun, is_inside

if TYPE_CHECKING:
    from hearth.worker.cache.resume_planner import ResumePlan

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
    reached: Mapping[Joint, bool]  # prefixes of the prompt that are kept: whether canonically
    version: object  # of the store that was searched


@dataclass(frozen=True, slots=True)
class _Step:
    """How a joint is reached: by this extent, over canonical extents only or not."""

    extent: Extent | None
    is_canonical: bool


class PrefixSearch:
    """One lookup. `is_exact` allows canonical extents only.

    Costs one dictionary lookup a cut, and one comparison for each branch that leaves the path.
    """

    def __init__(self, store: ExtentStore, query: PrefixQuery, is_exact: bool) -> None:
        self._store = store
        self._root = store.root_of(query.root)
        self._query = query
        self._is_exact = is_exact
        self._reached: dict[Joint, _Step] = {self._root: _Step(None, True)}
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
        reached = {joint: step.is_canonical for joint, step in self._reached.items()}
        facts = (deepest, is_diverging, is_prompt, reached, self._store.version)
        for position, is_canonical, joint, part in self._candidates():
            path = self._resumable(position, joint, part)
            if path is not None:
                return FoundPrefix(position, path, is_canonical, *facts)
        return FoundPrefix(0, (), True, *facts)

    def _walk_canonical(self) -> Joint:
        """Go from cut to cut as far as there are canonical extents; return the last joint."""
        joint = self._root
        for name in self._query.names:
            found = self._store.joint(name)
            extent = found.arrival if found is not None else None
            if extent is None or not extent.is_canonical or extent.start is not joint:
                break
            joint = extent.end
            self._reached[joint] = _Step(extent, True)
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
                    self._reached[extent.end] = _Step(extent, False)
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

    def _candidates(self) -> Iterator[tuple[int, bool, Joint, Extent | None]]:
        """Yield (position, is canonical, joint, extent begun there), the best first."""
        limit = self._query.limit
        rows: list[tuple[int, bool, Joint, Extent | None]] = [
            (joint.position, step.is_canonical and not joint.is_snapshot_fast, joint, None)
            for joint, step in self._reached.items()
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
        self, position: int, joint: Joint, part: Extent | None
    ) -> tuple[Extent, ...] | None:
        """Return the path to `position`, or None where the layers lack what they need there."""
        layout = self._store.layout
        if layout.has_state and joint.snapshot is None:
            return None
        if self._is_exact and joint.is_snapshot_fast:
            return None
        if layout.window and not self._window_covered(joint, position - layout.window):
            return None
        path = [] if part is None else [part]
        while (extent := self._reached[joint].extent) is not None:
            path.append(extent)
            joint = extent.start
        return tuple(reversed(path))

    def _window_covered(self, joint: Joint, back_to: int) -> bool:
        while joint.position > max(0, back_to):
            extent = self._reached[joint].extent
            if extent is None or not extent.window_covers(back_to):
                return False
            joint = extent.start
        return True
