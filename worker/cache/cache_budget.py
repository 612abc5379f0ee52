"""Counts the bytes and buffers of kept KV, and holds their limits."""

from dataclasses import dataclass
from typing import Final

MB: Final = 1024 * 1024
BUFFERS_MAX: Final = 400_000  # Metal allows 499,000 in a process; weights and steps need the rest


@dataclass(slots=True)
class Budget:
    """The limits of kept KV, and what is used of them. Live slots are not counted.

    `bytes_max` moves with the worker's share of the machine (`KVManager.share_out`).
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
