"""Sets BLAS and malloc up for processes that run MLX on Linux. macOS needs none of this.

The mlx-cpu wheel links a reference BLAS. Preloading OpenBLAS makes an fp32 product 16 times faster;
its variable must be in the environment before the process starts.

On a CPU, MLX's arrays come from malloc. Once large blocks were freed, glibc takes blocks of up to
32 MB from its heaps, and gaps between living blocks are never returned. A worker that held 150 MB
grew to 659 MB in a soak of 20 minutes, and a proxy to 816 MB instead of 467 after 300 requests with
images of 2 MB. Mapped blocks return to the system when they are freed.

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
    """Return the variables that preload OpenBLAS; empty if it is missing or not needed."""
    if sys.platform != "linux" or environ.get("LD_PRELOAD"):
        return {}
    for library in _LIBRARIES:
        if Path(library).exists():
            return {
                "LD_PRELOAD": library,
                "OPENBLAS_NUM_THREADS": environ.get("OPENBLAS_NUM_THREADS", "1"),
            }
    return {}


_MAPPED_BYTES: Final = 262_144  # least size of mapped blocks; glibc would raise an unset limit
_M_MMAP_THRESHOLD: Final = -3  # glibc's number of this option
_WANTED: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(_MAPPED_BYTES),
    "MALLOC_ARENA_MAX": "2",  # number of heaps; the default is one per thread
}


def malloc_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return malloc's variables for a process that runs MLX, without those already set."""
    if sys.platform != "linux":
        return {}
    return {name: value for name, value in _WANTED.items() if name not in environ}


def map_large_blocks(environ: Mapping[str, str]) -> bool:
    """Make this process map large blocks, unless the user set a limit; return whether it does."""
    if sys.platform != "linux" or "MALLOC_MMAP_THRESHOLD_" in environ:
        return False
    libc = ctypes.CDLL(None)
    return hasattr(libc, "mallopt") and bool(libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES))
