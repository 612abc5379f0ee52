"""Counts as MLX's Metal allocator does: which buffers are allocated, cached, wired.

It follows mlx/backend/metal/allocator.cpp, resident.cpp and backend/common/buffer_cache.h of MLX at
846d176 (0.32.2). What stays out: how wired bytes are spread over several residency sets of Metal,
which changes no total, and the limit of resources.
"""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from scripts.harness.mac.mac_hardware import PAGE, Mac, rounded_up

HEAP_BYTES: Final = 1024 * 1024  # one buffer, made with the allocator, for arrays of a few bytes
HEAP_BELOW: Final = 256  # bytes of an array that lies in the heap


@dataclass(eq=False, slots=True)
class Buffer:
    """One Metal buffer."""

    length: int  # as MLX counts it
    purpose: str  # "weights", "kv", ...
    is_wired: bool = False

    @property
    def allocated_bytes(self) -> int:
        """What the residency set counts: whole pages."""
        return rounded_up(self.length)


class ResidencySet:
    """Holds the buffers that are wired: those that fitted under the limit when they came.

    A buffer that did not fit is tracked, and enters when the limit is raised. `entered` and `left`
    count buffers by their purpose. Where it is not enabled its limit stays 0, and nothing fits.
    """

    def __init__(self, is_enabled: bool = True, chance: random.Random | None = None) -> None:
        self._is_enabled = is_enabled
        self._chance = chance  # the order in which a new limit is filled: a hash map's
        self._tracked: dict[Buffer, None] = {}
        self._limit = 0
        self.wired_bytes = 0
        self.entered: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def wired_of(self, purpose: str) -> int:
        """Return the bytes that are wired for `purpose`."""
        return sum(b.allocated_bytes for b in self._tracked if b.is_wired and b.purpose == purpose)

    def insert(self, buffer: Buffer) -> None:
        assert buffer not in self._tracked, buffer
        self._tracked[buffer] = None
        self._wire_if_it_fits(buffer)

    def erase(self, buffer: Buffer) -> None:
        del self._tracked[buffer]
        if buffer.is_wired:
            self._unwire(buffer)

    def resize(self, limit: int) -> None:
        """Wire up to `limit` bytes: add what fits now, or take out what is too much."""
        if not self._is_enabled or limit == self._limit:
            return
        self._limit = limit
        buffers = list(self._tracked)
        if self._chance is not None:
            self._chance.shuffle(buffers)
        grows = self.wired_bytes < limit
        for buffer in buffers:
            if grows and not buffer.is_wired:
                self._wire_if_it_fits(buffer)
            elif buffer.is_wired and self.wired_bytes > limit:
                self._unwire(buffer)

    def _wire_if_it_fits(self, buffer: Buffer) -> None:
        if self.wired_bytes + buffer.allocated_bytes <= self._limit:
            buffer.is_wired = True
            self.wired_bytes += buffer.allocated_bytes
            self.entered[buffer.purpose] += 1

    def _unwire(self, buffer: Buffer) -> None:
        buffer.is_wired = False
        self.wired_bytes -= buffer.allocated_bytes
        self.left[buffer.purpose] += 1


class MetalMemory:
    """Allocates and frees buffers as MLX does on one Mac, for one process.

    A freed buffer stays in the cache, and where it was wired it stays wired, until it is reused,
    the cache is emptied, or memory is short.
    """

    def __init__(self, mac: Mac, chance: random.Random | None = None) -> None:
        self.residency = ResidencySet(mac.has_residency_sets, chance)
        self._recommended = mac.recommended_bytes
        self.limit = int(min(1.5 * self._recommended, 0.95 * mac.memory_bytes))
        self.wired_limit = 0
        self._cached: dict[Buffer, None] = {}  # the longest unused first
        self.active_bytes = 0
        self.cached_bytes = 0
        self.residency.insert(Buffer(HEAP_BYTES, "heap"))

    def set_wired_limit(self, limit: int) -> int:
        """Set the limit; return the one before.

        Raises:
            ValueError: it is more than the device recommends.
        """
        if limit > self._recommended:
            raise ValueError(
                "[metal::set_wired_limit] Setting a wired limit larger than the maximum working "
                "set size is not allowed."
            )
        old, self.wired_limit = self.wired_limit, limit
        self.residency.resize(limit)
        return old

    def set_limit(self, limit: int) -> int:
        old, self.limit = self.limit, limit
        return old

    def malloc(self, nbytes: int, purpose: str = "") -> Buffer:
        """Return a buffer for an array of so many bytes, from the cache where one will do."""
        assert nbytes > 0, nbytes
        length = rounded_up(nbytes) if nbytes > PAGE else nbytes
        length_max = min(2 * length, length + 2 * PAGE)
        fitting = [each for each in self._cached if length <= each.length < length_max]
        if fitting:
            buffer = min(fitting, key=lambda each: each.length)
            del self._cached[buffer]
            self.cached_bytes -= buffer.length
            if buffer.is_wired and buffer.purpose != purpose:
                self.residency.entered[purpose] += 1  # wired memory serves another purpose now
            buffer.purpose = purpose
        else:
            gc_limit = min(self.limit, int(0.95 * self._recommended))
            if (over := self.active_bytes + self.cached_bytes + length - gc_limit) >= 0:
                self._shrink_cache(over)
            buffer = Buffer(length, purpose)
            if length >= HEAP_BELOW:
                self.residency.insert(buffer)
        self.active_bytes += buffer.length
        return buffer

    def free(self, buffer: Buffer) -> None:
        """Give an array's buffer back, to the cache."""
        self.active_bytes -= buffer.length
        self._cached[buffer] = None
        self.cached_bytes += buffer.length

    def clear_cache(self) -> None:
        self._shrink_cache(self.cached_bytes)

    def _shrink_cache(self, nbytes: int) -> None:
        """Release cached buffers, the longest unused first; all where nearly all has to go."""
        goal = 0 if nbytes >= 0.9 * self.cached_bytes else self.cached_bytes - nbytes
        while self.cached_bytes > goal:
            buffer = next(iter(self._cached))
            del self._cached[buffer]
            self.cached_bytes -= buffer.length
            if buffer.length >= HEAP_BELOW:
                self.residency.erase(buffer)


def load(memory: MetalMemory, sizes: Iterable[int], purpose: str = "weights") -> list[Buffer]:
    """Have arrays of these sizes loaded, in this order."""
    return [memory.malloc(nbytes, purpose) for nbytes in sizes]
