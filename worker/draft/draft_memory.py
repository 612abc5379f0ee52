"""Holds what a worker remembers for drafting, in bounds, and begins each answer's drafter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.worker.draft.answer_drafter import AnswerDrafter, AnswerSources, DraftCounts
from hearth.worker.draft.draft_length import CPU_CURVE, DraftLength, TextKind
from hearth.worker.draft.earlier_answers import EarlierAnswers
from hearth.worker.draft.history_room import HistoryRoom

OWNERS_MAX: Final = 64  # whose rates are remembered: some 10 KB each


class DraftMemory:
    """Earlier answers and learned rates by API key, and the histories of answers that draft now.

    All of it together holds at most 32 MB. What one owner was answered, and how well it could be
    drafted, serves that owner alone. Owner: the inference thread.
    """

    def __init__(self, curve: Mapping[int, float] = CPU_CURVE) -> None:
        """`curve` says what forwards of so many rows cost."""
        self.counts = DraftCounts()  # of all answers that have ended
        self._curve = curve
        self._answers = EarlierAnswers()
        self._lengths: MemoryByOwner[str, DraftLength] = MemoryByOwner(OWNERS_MAX)
        self._room = HistoryRoom()

    @property
    def nbytes(self) -> int:
        """Bytes of all tokens that are kept, and of their tables."""
        return self._answers.nbytes + self._room.nbytes

    def begin(
        self,
        owner: str,
        sources: AnswerSources,
        kind: Callable[[], TextKind],
        allows_trees: bool = False,
    ) -> AnswerDrafter:
        """Return the drafter of an answer that begins; `end` it.

        `sources` are those that the request brings; the memory's own come to them.
        """
        sources = replace(sources, earlier_answers=lambda: self._answers.of(owner), room=self._room)
        return AnswerDrafter(sources, self._length_of(owner), kind, allows_trees)

    def end(self, drafter: AnswerDrafter) -> None:
        """Count what a drafter did that drafts no more."""
        self._room.release(drafter)
        drafter.drop_history()
        self.counts.add(drafter.counts)

    def keep(self, owner: str, answer: Sequence[int]) -> None:
        """Remember the tokens of an answer, for its owner's next ones."""
        self._answers.keep(owner, answer)

    def clear(self) -> None:
        """Forget all that outlives an answer."""
        self._answers.clear()
        self._lengths.clear()

    def _length_of(self, owner: str) -> DraftLength:
        length = self._lengths.get(owner, "")
        if length is None:
            length = DraftLength(self._curve)
            self._lengths.put(owner, "", length)
        return length
