"""Holds what a worker remembers for drafting, in bounds, and begins each answer's drafter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.worker.draft.answer_drafter import AnswerDrafter, AnswerSources, DraftCounts
from hearth.worker.draft.draft_length import CPU_CURVE, DraftLength, TextKind
from hearth.worker.draft.token_history import SEPARATOR, TokenHistory

OWNERS_MAX: Final = 64  # whose rates are remembered: some 10 KB each
BYTES_MAX: Final = 8 << 20  # of all owners' answers together, some 350,000 tokens
TOKENS_MIN: Final = 16  # of an answer: a shorter one spares less than it takes


class DraftMemory:
    """Earlier answers and learned rates by API key: some 9 MB at most.

    What one owner was answered, and how well it could be drafted, serves that owner alone: how fast
    an answer came would tell another that it was said. Where room for answers is short, the owner
    that holds most forgets the older half of them. So one that holds less than an equal share
    loses nothing by what others are answered. Beside it each answer that is drafted has an index
    of its conversation and prediction, 24 bytes a token: a thousandth of what their KV takes.
    Invariant: `nbytes` is at most the constructor's `bytes_max`. Owner: the inference thread.
    """

    def __init__(self, curve: Mapping[int, float] = CPU_CURVE, bytes_max: int = BYTES_MAX) -> None:
        """`curve` says what forwards of so many rows cost."""
        self.counts = DraftCounts()  # of all answers that have ended
        self._curve = curve
        self._bytes_max = bytes_max
        # Kept for one key: tokens of answers, 8 MB
        self._answers: dict[str, TokenHistory] = {}
        # Kept for one key: how well answers could be drafted
        self._lengths: MemoryByOwner[str, DraftLength] = MemoryByOwner(OWNERS_MAX)

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens that are kept, and of their tables."""
        return sum(history.nbytes for history in self._answers.values())

    def begin(
        self,
        owner: str | None,
        sources: AnswerSources,
        kind: Callable[[], TextKind],
        allows_trees: bool = False,
    ) -> AnswerDrafter:
        """Return the drafter of an answer that begins.

        `sources` are those that the request brings; the memory's own come to them. Where `owner`
        is None, nothing is remembered of the answer, nor anything for it.
        """
        if owner is None:
            return AnswerDrafter(sources, DraftLength(self._curve), kind, allows_trees)
        sources = replace(sources, earlier_answers=lambda: self.answers_of(owner))
        length = self._lengths.get(owner, "") or DraftLength(self._curve)
        self._lengths.put(owner, "", length)
        return AnswerDrafter(sources, length, kind, allows_trees)

    def answers_of(self, owner: str) -> TokenHistory | None:
        """Return the answers of `owner`, the newest last; to be looked up only."""
        return self._answers.get(owner)

    def keep(self, owner: str, answer: Sequence[int]) -> None:
        """Remember an answer for its owner's next ones, unless it is too short to be worth it."""
        if len(answer) < TOKENS_MIN:
            return
        self._answers.setdefault(owner, TokenHistory()).extend([*answer, SEPARATOR])
        while self.nbytes > self._bytes_max:
            largest, history = max(self._answers.items(), key=lambda item: item[1].nbytes)
            newer = TokenHistory(history.newest(len(history) // 2))
            if newer.nbytes < history.nbytes:
                self._answers[largest] = newer
            else:
                del self._answers[largest]

    def clear(self) -> None:
        """Forget all that outlives an answer."""
        self._answers.clear()
        self._lengths.clear()
