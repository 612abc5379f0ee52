"""Finds the client's stop strings in streamed text, across token boundaries."""

from typing import NamedTuple


class StopHit(NamedTuple):
    """A text that may be shown, and the stop string that ended it (None: it goes on)."""

    text: str
    stop: str | None


class StopMatcher:
    """Passes text through, holding back only what may be the beginning of a stop string.

    Invariants: the text returned over all calls is the input up to the stop string that is
    complete first, exclusive, however the input was cut into pieces; of several that end there the
    longest counts. What is held back is shorter than the longest stop string.
    Owner: the inference thread.
    """

    def __init__(self, stops: list[str]) -> None:
        assert all(stops), "an empty stop string would end everything at once"
        self._stops = stops
        self._partial_max = max(map(len, stops), default=1) - 1
        self.held = ""  # what may be the beginning of one

    def feed(self, text: str) -> StopHit:
        """Take the next piece of text."""
        if not self._stops:
            return StopHit(text, None)
        self.held += text
        hit = self._first_complete()
        if hit is not None:
            start, stop = hit
            shown, self.held = self.held[:start], ""
            return StopHit(shown, stop)
        keep = self._partial_length()
        cut = len(self.held) - keep
        shown, self.held = self.held[:cut], self.held[cut:]
        assert len(self.held) <= self._partial_max, (len(self.held), self._partial_max)
        return StopHit(shown, None)

    def finish(self) -> str:
        """Return what was held back: no stop string can complete any more."""
        shown, self.held = self.held, ""
        return shown

    def _first_complete(self) -> tuple[int, str] | None:
        hits = [(self.held.find(stop), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in hits if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _partial_length(self) -> int:
        """Return the length of the longest tail that begins some stop string."""
        for length in range(min(self._partial_max, len(self.held)), 0, -1):
            tail = self.held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
