"""Counts the bytes and buffers of kept KV, and holds their limits."""

from dataclasses import dataclass
from typing import Final

MB: Final = 1024 * 1024
SHARE_OF_WORKING_SET: Final = 0.2
AUTO_BYTES_MIN: Final = 256 * MB
AUTO_BYTES_MAX: Final = 8192 * MB
UNKNOWN_DEVICE_BYTES: Final = 512 * MB
BUFFERS_MAX: Final = 400_000  # Metal allows 499,000 in a process; weights and steps need the rest


def auto_bytes(working_set_bytes: int | None) -> int:
    """Return the default budget for a device's recommended working set (None = not told)."""
    if working_set_bytes is None:
        return UNKNOWN_DEVICE_BYTES
    share = int(working_set_bytes * SHARE_OF_WORKING_SET)
    return min(max(share, AUTO_BYTES_MIN), AUTO_BYTES_MAX)


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
