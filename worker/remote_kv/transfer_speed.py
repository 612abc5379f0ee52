"""Measures how fast KV comes from each other worker."""

from dataclasses import dataclass
from typing import Final

from hearth.shared.suspending_clock import awake_s

KEPT: Final = 0.8  # how much of the older pieces' weight is left after each piece
STALE_S: Final = 60.0  # a line that was slow then may be fast now: it is tried again
ENOUGH_S: Final = 0.25  # of pieces, or ...
ENOUGH_PIECES: Final = 4.0  # by weight, that is eight: fewer may be a disk's or a machine's hiccup
HOLDERS_MAX: Final = 64
_SECONDS_MIN: Final = 1e-6


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What came of late, the newest counting most."""

    nbytes: float = 0.0
    seconds: float = 0.0
    count: float = 0.0
    last_at: float = 0.0


class TransferSpeed:
    """Averages over the last pieces of each holder, the newest counting most.

    Owner: the I/O thread; any may read.
    """

    def __init__(self) -> None:
        self._by_holder: dict[int, _Pieces] = {}

    def note(self, holder: int, nbytes: int, seconds: float) -> None:
        assert nbytes > 0 and seconds >= 0, (nbytes, seconds)
        had = self._by_holder.pop(holder, _Pieces())
        if awake_s() - had.last_at > STALE_S:
            had = _Pieces()
        while len(self._by_holder) >= HOLDERS_MAX:
            del self._by_holder[next(iter(self._by_holder))]
        self._by_holder[holder] = _Pieces(
            had.nbytes * KEPT + nbytes,
            had.seconds * KEPT + seconds,
            had.count * KEPT + 1,
            awake_s(),
        )

    def bytes_per_s(self, holder: int) -> float | None:
        """Return what was measured of late; None where too little was to tell."""
        had = self._by_holder.get(holder, _Pieces())
        is_enough = had.seconds >= ENOUGH_S or had.count >= ENOUGH_PIECES
        if not is_enough or awake_s() - had.last_at > STALE_S:
            return None
        return had.nbytes / max(had.seconds, _SECONDS_MIN)

    def report(self) -> dict[str, float]:
        found = {holder: self.bytes_per_s(holder) for holder in list(self._by_holder)}
        return {str(holder): round(rate) for holder, rate in found.items() if rate is not None}
