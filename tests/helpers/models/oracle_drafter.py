"""Drafts what an answer is known to say next, as a chain or a tree, and lies about some of it."""

import random
from collections.abc import Sequence

from hearth.worker.draft.draft import NO_DRAFT, Draft, DraftSource, chain


class OracleDrafter:
    """Knows an answer's tokens; each token of a draft is a lie with probability `lies`.

    `lengths` are those of the drafts, in turn; 0 = none this time.
    """

    model = None  # that would follow the answer

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
        draft = self._draft(length)
        self.rows += len(draft)
        return draft

    def _draft(self, length: int) -> Draft:
        right = self._truth[len(self.taken) : len(self.taken) + length]
        said = [token ^ (self._chance.random() < self._lies) for token in right]
        return chain(said, ["history"] * len(said))

    def record(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        assert list(accepted) == list(range(len(accepted))), accepted
        self.accepted += len(accepted)


class TreeOracle(OracleDrafter):
    """Draws trees at random; the answer's next tokens are somewhere in them.

    A node behind a right one is right unless it is a lie, with probability `lies`, or stands beside
    a right one. With `branching` 0 each node is behind the one before it; with 1 behind any.
    """

    def __init__(
        self,
        truth: Sequence[int],
        lies: float = 0.0,
        lengths: Sequence[int] = (7,),
        seed: int = 0,
        branching: float = 0.7,
    ) -> None:
        super().__init__(truth, lies, lengths, seed)
        self._branching = branching
        self.branched = 0  # drafts that were no chains
        self.off_the_front = 0  # accepted paths that were not their draft's beginning

    def _draft(self, length: int) -> Draft:
        chance, tokens, parents = self._chance, list[int](), list[int]()
        right = {-1: len(self.taken)}  # nodes that are right, and which token comes behind each
        for node in range(length):
            parent = node - 1 if chance.random() >= self._branching else chance.randrange(-1, node)
            beside = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
            place = right.get(parent, len(self._truth))
            truth = self._truth[place] if place < len(self._truth) else None
            if truth is not None and truth not in beside and chance.random() >= self._lies:
                tokens.append(truth)
                right[node] = place + 1
            else:
                tokens.append(next(lie for lie in range(90, 900) if lie not in {truth, *beside}))
            parents.append(parent)
        self.branched += parents != list(range(-1, length - 1))
        sources: list[DraftSource] = ["model"] * length
        return Draft(tuple(tokens), tuple(parents), tuple(sources))

    def record(self, draft: Draft, accepted: Sequence[int], rows: int) -> None:
        assert rows == 1 + len(draft), "nothing waits where branches are"
        places = range(len(self.taken), len(self.taken) + len(accepted))
        assert [draft.tokens[node] for node in accepted] == [self._truth[at] for at in places]
        assert [draft.parents[node] for node in accepted] == [-1, *accepted][: len(accepted)]
        self.off_the_front += list(accepted) != list(range(len(accepted)))
        self.accepted += len(accepted)
