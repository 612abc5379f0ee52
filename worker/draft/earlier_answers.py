"""Keeps the tokens of earlier answers, each API key's apart, so that what repeats is drafted."""

from collections.abc import Sequence
from typing import Final

from hearth.worker.draft.token_history import SEPARATOR, TokenHistory

BYTES_MAX: Final = 8 << 20  # of all owners together, some 350,000 tokens
TOKENS_MIN: Final = 16  # of an answer: a shorter one spares less than it takes


class EarlierAnswers:
    """A history of each owner's answers, the newest last, up to a size of all together.

    Where room is short, the owner that holds most forgets the older half of what it holds. So one
    that holds less than an equal share loses nothing by what others are answered, and nobody is
    drafted what another key's answer said: how fast it came would tell that it was said.
    Invariant: `nbytes` is at most the constructor's `bytes_max`. Owner: the inference thread.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # Kept for one key: tokens of answers, 8 MB
        self._by_owner: dict[str, TokenHistory] = {}

    @property
    def nbytes(self) -> int:
        return sum(history.nbytes for history in self._by_owner.values())

    def of(self, owner: str) -> TokenHistory | None:
        """Return the answers of `owner`, to be looked up only, until the next `keep`."""
        return self._by_owner.get(owner)

    def keep(self, owner: str, tokens: Sequence[int]) -> None:
        """Remember an answer, unless it is too short to be worth it."""
        if len(tokens) < TOKENS_MIN:
            return
        history = self._by_owner.setdefault(owner, TokenHistory())
        history.extend([*tokens, SEPARATOR])
        while self.nbytes > self._bytes_max:
            self._halve_largest()

    def clear(self) -> None:
        self._by_owner.clear()

    def _halve_largest(self) -> None:
        owner, history = max(self._by_owner.items(), key=lambda item: item[1].nbytes)
        newer = TokenHistory(history.newest(len(history) // 2))
        if newer.nbytes < history.nbytes:
            self._by_owner[owner] = newer
        else:
            del self._by_owner[owner]
