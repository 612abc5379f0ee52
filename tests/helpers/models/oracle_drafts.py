"""Drafts for a worker's answers what a cold cache is known to say, and lies about some of it."""

from collections.abc import Callable, Sequence
from typing import Any

from hearth.worker.draft.answer_drafter import DraftCounts
from hearth.worker.schedule.answer_drafts import AnswerDrafts
from hearth.worker.schedule.request_state import Request
from tests.helpers.models.oracle_drafter import OracleDrafter


class OracleDrafts(AnswerDrafts):
    """Has every answer drafted for, in drafts of these lengths in turn, whatever they cost."""

    def __init__(
        self, truth_of: Callable[[list[int]], Sequence[int]], lies: float, lengths: Sequence[int]
    ) -> None:
        super().__init__()
        self._truth_of, self._lies, self._lengths = truth_of, lies, lengths
        self.accepted = 0

    def begin(self, request: Request) -> Any:
        drafter = OracleDrafter(self._truth_of(request.ids), self._lies, self._lengths)
        drafter.counts = DraftCounts()  # type: ignore[attr-defined]
        return drafter

    def stop(self) -> None:
        """Nothing is held, and the next answer is drafted for all the same."""

    def end(self, request: Request) -> None:
        if isinstance(request.drafter, OracleDrafter):
            self.accepted += request.drafter.accepted
