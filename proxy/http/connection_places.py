"""Bounds the open connections: where places run short, it closes the one that counts least."""

from collections.abc import Callable
from enum import IntEnum
from typing import Final, Literal, Protocol

Why = Literal["displaced", "malformed"]  # why a connection was closed

CONNECTIONS_MAX: Final = 1_000  # what their bodies take together is BodyBudget's
OVERSHOOT: Final = 2  # times the places, for as long as newcomers are not judged
FILES_A_CONNECTION: Final = 2  # its own, and one that an image is fetched by
FILES_SPARE: Final = 128  # the workers' sockets, journals, the log


class Standing(IntEnum):
    """What a connection is at; the lowest is closed first.

    Trusted is one whose last request came with a good key, or needed none.
    """

    IDLE_STRANGER = 0
    BUSY_STRANGER = 1
    IDLE_TRUSTED = 2
    BUSY_TRUSTED = 3  # never closed for another


class Closable(Protocol):
    """A connection that can be ended at once."""

    def abort(self) -> None: ...


class ConnectionPlaces:
    """All open connections by standing, the longest at it first. Owner: the event loop.

    A newcomer is not judged before what it sends could be read: for a moment there may be twice
    `count_max`. Invariant: behind each `trim` there are `count_max`, or one more where that many
    are amid requests of trusted clients: that one is told so (`are_taken`).
    """

    def __init__(self, count_max: int = CONNECTIONS_MAX) -> None:
        assert count_max > 0, count_max
        self.count_max = count_max
        self.on_closed: Callable[[Why], None] = lambda why: None
        self._rows: dict[Standing, dict[Closable, None]] = {each: {} for each in Standing}
        self._standings: dict[Closable, Standing] = {}

    def __len__(self) -> int:
        return len(self._standings)

    @property
    def are_taken(self) -> bool:
        """Tell whether there is no place that a newcomer may have."""
        return len(self._rows[Standing.BUSY_TRUSTED]) >= self.count_max

    @property
    def are_short(self) -> bool:
        """Tell whether `trim` has connections to close."""
        return len(self) > self.count_max and self._closable > 1

    def enter(self, newcomer: Closable) -> None:
        """Take `newcomer` in."""
        if len(self) >= OVERSHOOT * self.count_max:
            self._displace()
        self._put(newcomer, Standing.IDLE_STRANGER)

    def trim(self) -> None:
        """Close what there is no place for."""
        while self.are_short:
            self._displace()

    def move(self, connection: Closable, standing: Standing) -> None:
        """Note what `connection` is at now; of one that has left, nothing."""
        before = self._standings.get(connection)
        if before is not None and before is not standing:
            del self._rows[before][connection]
            self._put(connection, standing)

    def leave(self, connection: Closable) -> None:
        standing = self._standings.pop(connection, None)
        if standing is not None:
            del self._rows[standing][connection]

    @property
    def _closable(self) -> int:
        return len(self) - len(self._rows[Standing.BUSY_TRUSTED])

    def _put(self, connection: Closable, standing: Standing) -> None:
        self._standings[connection] = standing
        self._rows[standing][connection] = None

    def _displace(self) -> None:
        for standing in (Standing.IDLE_STRANGER, Standing.BUSY_STRANGER, Standing.IDLE_TRUSTED):
            for longest in self._rows[standing]:
                self.on_closed("displaced")
                self.leave(longest)
                longest.abort()
                return


def places_within(open_files_max: int) -> int:
    """Return how many connections a process may serve that may have so many files open."""
    return max(1, min(CONNECTIONS_MAX, (open_files_max - FILES_SPARE) // FILES_A_CONNECTION))
