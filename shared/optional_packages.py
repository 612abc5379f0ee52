"""Tells which optional packages (extras) are installed, and how to get one that is not."""

import importlib.util
from typing import Final

VISION_REMEDY: Final = (
    "install the extra 'vision' (python3 install_and_run.py --vision, or pip install '.[vision]')"
)


def has_vision() -> bool:
    """Return whether mlx-vlm is installed, without importing it."""
    return importlib.util.find_spec("mlx_vlm") is not None
