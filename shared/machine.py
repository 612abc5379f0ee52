"""Finds this machine's memory and its optional packages (extras), without importing MLX."""

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Final

_ON_CPU_BYTES_MAX: Final = 8 * 1024**3


def physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_for_models() -> int:
    """Return the memory for which a model is recommended.

    On a CPU, it is capped at the smallest model's need, because larger models are too slow.
    """
    try:
        version("mlx-cpu")  # installed on Linux without a GPU
    except PackageNotFoundError:
        return physical_bytes()
    return min(physical_bytes(), _ON_CPU_BYTES_MAX)


VISION_REMEDY: Final = (
    "install the extra 'vision' (python3 install_and_run.py --vision, or pip install '.[vision]')"
)


def has_vision() -> bool:
    """Return whether mlx-vlm is installed, without importing it."""
    return importlib.util.find_spec("mlx_vlm") is not None
