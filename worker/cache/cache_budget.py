"""Counts the bytes and buffers of kept KV, and holds their limits."""

from dataclasses import dataclass
from typing import Final

from hearth.shared.settings import (
    CACHE_RAM_MB_MAX,
    CACHE_RAM_MB_MIN,
    CACHE_RAM_MB_UNKNOWN,
    CACHE_RAM_PERCENT,
)

MB: Final = 1024 * 1024
BUFFERS_MAX: Final = 400_000  # Metal allows 499,000 in a process; weights and steps need the rest


def auto_bytes(working_set_bytes: int | None) -> int:
    """Return the default budget for a device's recommended working set (None = not told)."""
    if working_set_bytes is None:
        return CACHE_RAM_MB_UNKNOWN * MB
    return min(max(share_of(working_set_bytes), CACHE_RAM_MB_MIN * MB), CACHE_RAM_MB_MAX * MB)


def share_of(nbytes: int) -> int:
    """Return what kept KV takes of so much memory, unless it is told otherwise."""
    return nbytes * CACHE_RAM_PERCENT // 100


@dataclass(slots=True)
class Budget:
    """The limits of kept KV, and what is used of them. Live slots are not counted.

    Invariant: what is used is never negative. Owner: the inference thread.
    """

    bytes_max: int
    buffers_max: int = BUFFERS_MAX
    bytes_used: int = 0
    buffers_used: int = 0

    def add(self, nbytes: int, buffers: int) -> None:
        self.bytes_used += nbytes
        self.buffers_used += buffers
        assert self.bytes_used >= 0 and self.buffers_used >= 0, (nbytes, buffers, self)

    def missing(self, nbytes: int, buffers: int) -> tuple[int, int]:
        """Return the bytes and buffers that must go before these fit; (0, 0) if they do."""
        return (
            max(0, self.bytes_used + nbytes - self.bytes_max),
            max(0, self.buffers_used + buffers - self.buffers_max),
        )
