"""Computes what is left free of a machine's memory, and of a worker's part of it. Numbers only."""

from typing import Final

GB: Final = 1024**3
RESERVE_BYTES_MAX: Final = 8 * GB  # of the machine's memory, left to all else that runs on it
RESERVE_SHARE: Final = 4  # a small machine keeps this part of its memory: 1 / 4


def default_limit(recommended: int | None, machine: int) -> int:
    """Return the limit of a machine of so much memory, whose device recommends so much or nothing.

    Beyond a GPU's recommended working set a Mac swaps; at it, with the system and an editor beside,
    one of 16 to 32 GB does too.
    """
    reserve = min(RESERVE_BYTES_MAX, machine // RESERVE_SHARE)
    return machine - reserve if recommended is None else min(recommended, machine - reserve)


def working_bytes(limit: int) -> int:
    """Return what of a limit is left for Python's objects and a short prompt's forward."""
    return min(limit // 20, GB)
