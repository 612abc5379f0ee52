"""Bounds what the histories of the answers that draft now hold together."""

from typing import Final, Protocol

BYTES_MAX: Final = 20 << 20


class HistoryHolder(Protocol):
    """Holds a history that it can make anew from what the request holds anyway."""

    @property
    def history_nbytes(self) -> int: ...

    def drop_history(self) -> None: ...


class HistoryRoom:
    """Those who hold a history, the one that made its own first, first.

    Who has lost its own for another's is given none again before one ends: answers that take turns
    would else make theirs anew at each token.
    Invariant: behind each `hold`, all of them but the newest hold no more than is left of
    `bytes_max`. Owner: the inference thread.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._holders: list[HistoryHolder] = []
        self._losers: list[HistoryHolder] = []

    @property
    def nbytes(self) -> int:
        return sum(holder.history_nbytes for holder in self._holders)

    def has_room(self, holder: HistoryHolder) -> bool:
        """Whether a holder may make a history now."""
        return all(other is not holder for other in self._losers)

    def hold(self, holder: HistoryHolder) -> None:
        """Take notice of a history that was made or has grown; others make room for it."""
        self._holders = [other for other in self._holders if other is not holder]
        self._holders.append(holder)
        while self.nbytes > self._bytes_max and len(self._holders) > 1:
            loser = self._holders.pop(0)
            loser.drop_history()
            self._losers.append(loser)

    def release(self, holder: HistoryHolder) -> None:
        """Forget a holder that has ended, if it is one: there is room for others."""
        self._holders = [other for other in self._holders if other is not holder]
        self._losers.clear()
