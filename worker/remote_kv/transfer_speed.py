"""Measures how fast KV comes from each other worker."""

from typing import Final

from hearth.shared.suspending_clock import awake_s

KEPT: Final = 0.8  # how much of the older pieces' weight is left after each piece
STALE_S: Final = 600.0  # a line that was slow then may be fast now: it is tried again
HOLDERS_MAX: Final = 64
_SECONDS_MIN: Final = 1e-6


class TransferSpeed:
    """Averages over the last pieces of each holder, the newest counting most.

    Owner: the I/O thread; any may read.
    """

    def __init__(self) -> None:
        self._by_holder: dict[int, tuple[float, float, float]] = {}  # bytes, seconds, last at

    def note(self, holder: int, nbytes: int, seconds: float) -> None:
        assert nbytes > 0 and seconds >= 0, (nbytes, seconds)
        had_bytes, had_s, _ = self._by_holder.pop(holder, (0.0, 0.0, 0.0))
        while len(self._by_holder) >= HOLDERS_MAX:
            del self._by_holder[next(iter(self._by_holder))]
        self._by_holder[holder] = had_bytes * KEPT + nbytes, had_s * KEPT + seconds, awake_s()

    def bytes_per_s(self, holder: int) -> float | None:
        """Return what was measured of late; None where nothing was."""
        nbytes, seconds, at = self._by_holder.get(holder, (0.0, 0.0, 0.0))
        if not nbytes or awake_s() - at > STALE_S:
            return None
        return nbytes / max(seconds, _SECONDS_MIN)

    def report(self) -> dict[str, float]:
        found = {holder: self.bytes_per_s(holder) for holder in list(self._by_holder)}
        return {str(holder): round(rate) for holder, rate in found.items() if rate is not None}
