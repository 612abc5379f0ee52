"""Gives memory that is free in this process back to the system."""

import ctypes
from typing import Final

import mlx.core as mx

_LIBC: Final = ctypes.CDLL(None)


def release_memory() -> None:
    """Return to the system the memory that MLX and malloc keep for later. Takes milliseconds.

    On a CPU MLX's arrays come from malloc, and glibc keeps what lies between blocks that live: a
    worker that has served long answers held 110 MB of an empty cache. Only glibc has malloc_trim.
    """
    mx.clear_cache()
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
