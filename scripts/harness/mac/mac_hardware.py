"""Tells what MLX and the kernel say about the chip and the memory of each kind of Mac.

The figures of 8, 16, 24, 32, 36, 48, 64, 128 and 192 GB were published by owners of such Macs
(`mx.device_info()`, `recommendedMaxWorkingSetSize` in logs of llama.cpp); those of 96, 256 and 512
GB follow their pattern. macOS 14 and older recommends less.
"""

from dataclasses import dataclass
from typing import Any, Final

GB: Final = 1024**3
MB: Final = 1024**2
PAGE: Final = 16 * 1024

GENERATIONS: Final = {"M1": 13, "M2": 14, "M3": 15, "M4": 16, "M5": 17}
SIZES: Final = {"": "g", "Pro": "s", "Max": "s", "Ultra": "d"}
# Up to so many GB of memory: the share that the device recommends.
SHARES: Final = {8: 2 / 3, 24: 0.74, 48: 0.78, 96: 0.81, 192: 0.84, 256: 0.87, 512: 0.9}
OLD_SHARES: Final = {32: 2 / 3, 512: 0.75}  # macOS 13 and 14


@dataclass(frozen=True, slots=True)
class Mac:
    """One Mac, as its kernel and MLX describe it."""

    chip: str  # "M1", "M4 Pro", "M3 Ultra"
    memory_gb: int
    macos: int = 26
    wired_limit_mb: int = 0  # sysctl iogpu.wired_limit_mb; 0 = what the device recommends

    @property
    def memory_bytes(self) -> int:
        return self.memory_gb * GB

    @property
    def architecture(self) -> str:
        generation, _, size = self.chip.partition(" ")
        return f"applegpu_g{GENERATIONS[generation]}{SIZES[size]}"

    @property
    def has_residency_sets(self) -> bool:
        """Whether MLX wires anything: Metal has residency sets from macOS 15 on."""
        return self.macos >= 15

    @property
    def recommended_bytes(self) -> int:
        return self.wired_limit_mb * MB or self._stock_bytes

    @property
    def _stock_bytes(self) -> int:
        shares = SHARES if self.has_residency_sets else OLD_SHARES
        share = next(share for most, share in shares.items() if self.memory_gb <= most)
        return rounded_up(int(self.memory_bytes * share))

    def device_info(self) -> dict[str, Any]:
        """Return what `mx.device_info()` returns there."""
        return {
            "device_name": f"Apple {self.chip}",
            "architecture": self.architecture,
            "memory_size": self.memory_bytes,
            "max_recommended_working_set_size": self.recommended_bytes,
            "max_buffer_length": self._stock_bytes * 3 // 4 // PAGE * PAGE,
            "resource_limit": 499_000,  # buffers that a process may have
        }


def rounded_up(nbytes: int) -> int:
    """Return `nbytes` in whole pages."""
    return -(-nbytes // PAGE) * PAGE


# One for each size of memory, and for each generation and size of chip.
MACS: Final = (
    Mac("M1", 8),
    Mac("M2", 16),
    Mac("M4", 24),
    Mac("M5", 32),
    Mac("M3 Pro", 36),
    Mac("M4 Pro", 48),
    Mac("M1 Max", 64),
    Mac("M2 Max", 96),
    Mac("M5 Max", 128),
    Mac("M2 Ultra", 192),
    Mac("M3 Ultra", 256),
    Mac("M3 Ultra", 512),
)
