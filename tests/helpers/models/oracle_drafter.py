"""Drafts what an answer is known to say next, and lies about some of it."""

import random
from collections.abc import Sequence

from hearth.worker.draft.draft import NO_DRAFT, Draft, chain


class OracleDrafter:
    """Knows an answer's tokens; each token of a draft is a lie with probability `lies`.

    `lengths` are those of the drafts, in turn; 0 = none this time.
    """

    def __init__(
        self, truth: Sequence[int], lies: float = 0.0, lengths: Sequence[int] = (4,), seed: int = 0
    ) -> None:
        self._truth, self._lies, self._lengths = list(truth), lies, list(lengths)
        self._chance = random.Random(seed)
        self._rounds = 0
        self.taken: list[int] = []
        self.rows = 0
        self.forwards = 0
        self.accepted = 0

    def take(self, tokens: Sequence[int]) -> None:
        self.taken += tokens

    def is_promising(self) -> bool:
        return True

    def propose(self, tokens_max: int, waiting: int) -> Draft:
        self.forwards += 1
        self.rows += waiting
        length = min(tokens_max, self._lengths[self._rounds % len(self._lengths)])
        self._rounds += 1
        if not length:
            return NO_DRAFT
        right = self._truth[len(self.taken) : len(self.taken) + length]
        said = [token ^ (self._chance.random() < self._lies) for token in right]
        self.rows += len(said)
        return chain(said, ["history"] * len(said))

    def note(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        assert list(accepted) == list(range(len(accepted))), accepted
        self.accepted += len(accepted)
