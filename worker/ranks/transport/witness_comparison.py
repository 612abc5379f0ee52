"""Compares what each follower says that it computes with what rank 0 computes."""

from collections import deque
from collections.abc import Iterable
from typing import Final

from hearth.worker.ranks.rank_link import RankMismatch, unpack

FACTS_AHEAD_MAX: Final = 100_000  # of one side that the other has not said yet
SHOWN_CHARS_MAX: Final = 200


class WitnessComparison:
    """Holds the facts of rank 0 until every follower has said the same.

    Owner: the link's thread; `note_own` is called by the inference thread, which never waits.
    Invariant: `_own[0]` is the fact at `_first`, the least count of facts that a follower has said.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self.own_count = 0
        # Kept for nobody: up to 100,000 steps with sampled ids
        self._own: deque[bytes] = deque()
        self._first = 0
        self.counts = dict.fromkeys(ranks, 0)  # of facts that each follower said and that are equal
        # Kept for nobody: what ranks have said that is ahead
        self._ahead: dict[int, deque[bytes]] = {rank: deque() for rank in self.counts}

    def note_own(self, facts: bytes) -> None:
        self._own.append(facts)
        self.own_count += 1

    def note(self, rank: int, facts: bytes) -> None:
        """Take in what `rank` says next. Raises: RankMismatch."""
        self._ahead[rank].append(facts)
        self.compare(rank)

    def compare(self, rank: int) -> None:
        """Compare what both sides have said by now. Raises: RankMismatch."""
        ahead = self._ahead[rank]
        while ahead and self.counts[rank] < self.own_count:
            ordinal = self.counts[rank]
            own, theirs = self._own[ordinal - self._first], ahead.popleft()
            if own != theirs:
                raise RankMismatch(
                    f"step {ordinal + 1}: rank 0 computes {_shown(own)}, "
                    f"rank {rank} {_shown(theirs)}"
                )
            self.counts[rank] += 1
        while self._first < min(self.counts.values()):  # every follower has said it
            self._own.popleft()
            self._first += 1
        if max(len(ahead), len(self._own)) > FACTS_AHEAD_MAX:
            raise RankMismatch(f"rank {rank} is over {FACTS_AHEAD_MAX:,} steps away from rank 0")

    def said_count(self, rank: int) -> int:
        """Return how many facts `rank` has said, compared or not."""
        return self.counts[rank] + len(self._ahead[rank])


def _shown(facts: bytes) -> str:
    text = repr(unpack(facts))
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "..."
