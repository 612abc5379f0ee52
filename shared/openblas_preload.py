"""Finds the OpenBLAS that makes MLX's CPU backend fast on Linux.

The mlx-cpu wheel links a reference BLAS; OpenBLAS in front of it makes an fp32 product 16 times
faster. It must be in the environment before a process starts. Nothing of this concerns macOS.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

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
