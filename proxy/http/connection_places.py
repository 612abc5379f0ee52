"""Bounds the open connections: where places run short, it closes the one that counts least."""

from asyncio import Transport
from collections.abc import Callable
from typing import Final, Literal

Why = Literal["displaced", "malformed"]  # why a connection was closed

CONNECTIONS_MAX: Final = 1_000  # what their bodies take together is BodyBudget's
OVERSHOOT: Final = 2  # times the places, for as long as newcomers are not judged
FILES_A_CONNECTION: Final = 2  # its own, and one that an image is fetched by
FILES_SPARE: Final = 128  # the workers' sockets, journals, the log


class ConnectionPlaces:
    """All open connections, and which of them goes first. Owner: the event loop.

    The order is: without a good key and idle, without one amid a request, idle with one; of those
    alike the one that is so longest. A newcomer is not judged before what it sends could be read:
    for a moment there may be OVERSHOOT times `count_max`. Invariant: behind each `trim` there are
    `count_max`, or one more where that many are amid requests with a key: it is told `are_taken`.
    """

    def __init__(self, count_max: int = CONNECTIONS_MAX) -> None:
        assert count_max > 0, count_max
        self.count_max = count_max
        self.on_closed: Callable[[Why], None] = lambda why: None
        # Each one's (is trusted, is busy), the longest so first. Trusted: its last request came
        # with a good key, or needed none.
        self._standings: dict[Transport, tuple[bool, bool]] = {}
        self._is_to_be_trimmed = False  # in a flood each newcomer still has its time to be read

    def __len__(self) -> int:
        return len(self._standings)

    @property
    def are_taken(self) -> bool:
        """Tell whether there is no place that a newcomer may have."""
        taken = len(self) >= self.count_max and sum(map(all, self._standings.values()))
        return taken >= self.count_max

    def enter(self, newcomer: Transport) -> bool:
        """Take `newcomer` in; return whether `trim` is to be called once it has shown itself."""
        if len(self) >= OVERSHOOT * self.count_max:  # some at once: to seek one takes as long
            self._close(max(1, self.count_max // 10))
        self._standings[newcomer] = (False, False)
        was_asked = self._is_to_be_trimmed
        self._is_to_be_trimmed |= len(self) > self.count_max
        return self._is_to_be_trimmed > was_asked

    def trim(self) -> None:
        """Close what there is no place for, but none amid a trusted request, nor the last left."""
        self._is_to_be_trimmed = False
        self._close(len(self) - self.count_max)

    def _close(self, count: int) -> None:
        closable = [each for each, standing in self._standings.items() if not all(standing)]
        closable.sort(key=self._standings.__getitem__)
        for each in closable[: max(0, min(count, len(closable) - 1))]:
            self.on_closed("displaced")
            self.leave(each)
            each.abort()

    def move(self, connection: Transport, *, is_trusted: bool, is_busy: bool) -> None:
        """Note what `connection` is at now; of one that has left, nothing."""
        standing = (is_trusted, is_busy)
        if self._standings.get(connection, standing) != standing:
            del self._standings[connection]
            self._standings[connection] = standing

    def leave(self, connection: Transport) -> None:
        self._standings.pop(connection, None)


def places_within(open_files_max: int) -> int:
    """Return how many connections a process may serve that may have so many files open."""
    return max(1, min(CONNECTIONS_MAX, (open_files_max - FILES_SPARE) // FILES_A_CONNECTION))
