"""Bounds the open connections: where places run short, it closes the one that counts least."""

from collections.abc import Callable
from enum import IntEnum
from typing import Final, Literal, Protocol

Why = Literal["displaced", "malformed"]  # why a connection was closed

CONNECTIONS_MAX: Final = 1_000  # what their bodies take together is BodyBudget's
FILES_A_CONNECTION: Final = 2  # its own, and one that an image is fetched by
FILES_SPARE: Final = 128  # the workers' sockets, journals and LiteLLM's


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

    Invariant: there are `count_max` of them, or one more while that many are amid requests of
    trusted clients: the newcomer is not closed but told so (`are_taken`).
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

    def enter(self, newcomer: Closable) -> None:
        """Give `newcomer` a place, another's where there is none left."""
        if len(self) >= self.count_max:
            self._displace()
        self._put(newcomer, Standing.IDLE_STRANGER)

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
