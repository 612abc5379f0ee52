"""Says what a process that runs MLX on Linux needs of BLAS and malloc. None of this concerns macOS.

The mlx-cpu wheel links a reference BLAS; OpenBLAS in front of it makes an fp32 product 16 times
faster. It must be in the environment before a process starts.

On a CPU MLX's arrays come from malloc. By default glibc takes blocks of up to 32 MB from its heaps
once some were freed, and what lies between living blocks stays: a worker that held 150 MB had
659 MB after 20 minutes of a soak, and a proxy 816 MB in place of 467 after 300 requests
with images of 2 MB. Blocks that are mapped go back when they are freed.

Standard library only: the installer runs this file by itself.
"""

import ctypes
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib/x86_64-linux-gnu/libopenblas.so.0",
    "/usr/lib/aarch64-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0",
)


def openblas_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to `environ` for a process that runs MLX; empty where nothing helps."""
    if sys.platform != "linux" or environ.get("LD_PRELOAD"):
        return {}
    for library in _LIBRARIES:
        if Path(library).exists():
            return {
                "LD_PRELOAD": library,
                "OPENBLAS_NUM_THREADS": environ.get("OPENBLAS_NUM_THREADS", "1"),
            }
    return {}


_MAPPED_BYTES: Final = 262_144  # from which on a block is mapped, and never more
_M_MMAP_THRESHOLD: Final = -3  # glibc's name for it
_WANTED: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES),
    "MALLOC_ARENA_MAX": "2",  # heaps; one a thread is the default
}


def malloc_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to `environ` for a process that runs MLX; what is set there stays."""
    if sys.platform != "linux":
        return {}
    return {name: value for name, value in _WANTED.items() if name not in environ}


def map_large_blocks(environ: Mapping[str, str]) -> bool:
    """Have this process map its large blocks; say whether that was done. What is set stays."""
    if sys.platform != "linux" or "MALLOC_MMAP_THRESHOLD_" in environ:
        return False
    libc = ctypes.CDLL(None)
    return hasattr(libc, "mallopt") and bool(libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES))
