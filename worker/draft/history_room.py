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

    Invariant: behind each `hold`, all of them but the newest hold no more than is left of
    `bytes_max`. Owner: the inference thread.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._holders: list[HistoryHolder] = []

    @property
    def nbytes(self) -> int:
        return sum(holder.history_nbytes for holder in self._holders)

    def hold(self, holder: HistoryHolder) -> None:
        """Take notice of a history that was made or has grown; others make room for it."""
        self.release(holder)
        self._holders.append(holder)
        while self.nbytes > self._bytes_max and len(self._holders) > 1:
            self._holders.pop(0).drop_history()

    def release(self, holder: HistoryHolder) -> None:
        """Forget a holder, if it is one."""
        self._holders = [other for other in self._holders if other is not holder]
