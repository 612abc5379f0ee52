"""Tells what this machine has, without MLX: its memory, and the optional packages (extras)."""

import importlib.util
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Final

_ON_CPU_BYTES_MAX: Final = 8 * 1024**3


def physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_for_models() -> int:
    """Return the memory that a model is recommended by.

    On a CPU it is no more than the smallest model needs: a larger one is too slow there.
    """
    try:
        version("mlx-cpu")  # which Linux has without a GPU
    except PackageNotFoundError:
        return physical_bytes()
    return min(physical_bytes(), _ON_CPU_BYTES_MAX)


VISION_REMEDY: Final = (
    "install the extra 'vision' (python3 install_and_run.py --vision, or pip install '.[vision]')"
)


def has_vision() -> bool:
    """Return whether mlx-vlm is installed, without importing it."""
    return importlib.util.find_spec("mlx_vlm") is not None
