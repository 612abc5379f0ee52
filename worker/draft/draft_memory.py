"""Holds what a worker remembers for drafting, in bounds, and begins each answer's drafter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.worker.draft.answer_drafter import AnswerDrafter, AnswerSources, DraftCounts
from hearth.worker.draft.draft_length import CPU_CURVE, DraftLength, TextKind
from hearth.worker.draft.earlier_answers import EarlierAnswers

OWNERS_MAX: Final = 64  # whose rates are remembered: some 10 KB each


class DraftMemory:
    """Earlier answers and learned rates by API key: some 9 MB at most.

    What one owner was answered, and how well it could be drafted, serves that owner alone. Beside
    it each answer that is drafted has an index of its conversation, 24 bytes a token: a thousandth
    of what the tokens' KV takes. Owner: the inference thread.
    """

    def __init__(self, curve: Mapping[int, float] = CPU_CURVE) -> None:
        """`curve` says what forwards of so many rows cost."""
        self.counts = DraftCounts()  # of all answers that have ended
        self._curve = curve
        self._answers = EarlierAnswers()
        # Kept for one key: how well answers could be drafted
        self._lengths: MemoryByOwner[str, DraftLength] = MemoryByOwner(OWNERS_MAX)

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens that are kept, and of their tables."""
        return self._answers.nbytes

    def begin(
        self,
        owner: str | None,
        sources: AnswerSources,
        kind: Callable[[], TextKind],
        allows_trees: bool = False,
    ) -> AnswerDrafter:
        """Return the drafter of an answer that begins; `end` it.

        `sources` are those that the request brings; the memory's own come to them. Where `owner`
        is None, nothing is remembered of the answer, nor anything for it.
        """
        if owner is None:
            return AnswerDrafter(sources, DraftLength(self._curve), kind, allows_trees)
        sources = replace(sources, earlier_answers=lambda: self._answers.of(owner))
        length = self._lengths.get(owner, "") or DraftLength(self._curve)
        self._lengths.put(owner, "", length)
        return AnswerDrafter(sources, length, kind, allows_trees)

    def keep(self, owner: str, answer: Sequence[int]) -> None:
        """Remember the tokens of an answer, for its owner's next ones."""
        self._answers.keep(owner, answer)

    def clear(self) -> None:
        """Forget all that outlives an answer."""
        self._answers.clear()
        self._lengths.clear()
