"""Finds how much memory MLX may take on this machine, and holds it to that.

Owner: the inference thread.
"""

from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from hearth.shared.errors import StartError
from hearth.shared.settings_from_env import Settings

MB: Final = 1024 * 1024
GB: Final = 1024 * MB
WORKING_SHARE: Final = 0.05  # of the limit, for what a forward needs beside weights and KV


def memory_limit(settings: Settings) -> int:
    """Return how many bytes MLX may hold: MEMORY_LIMIT_MB, or else what the device recommends.

    Beyond a GPU's recommended working set a Mac swaps. A CPU recommends nothing: MLX's own default
    stands in, which is a share of the machine's memory.
    """
    if settings.memory_limit_mb:
        return settings.memory_limit_mb * MB
    size: Any = mx.device_info().get("max_recommended_working_set_size")
    return int(mx.get_memory_limit() if size is None else size)


def hold_memory(limit: int) -> None:
    """Tell MLX its limit, and keep the weights in a GPU's reach for the worker's life."""
    mx.set_memory_limit(limit)
    size: Any = mx.device_info().get("max_recommended_working_set_size")
    if size is not None:
        mx.set_wired_limit(min(limit, int(size)))


def room_in(limit: int) -> int:
    """Return what weights and KV may take of the limit."""
    return round(limit * (1 - WORKING_SHARE))


def held_bytes() -> int:
    """Return what MLX's arrays take now."""
    return int(mx.get_active_memory())


def weight_bytes(directory: Path) -> int:
    """Return what a checkpoint's weights take, as its files say."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def refuse_heavy(directory: Path, source: str, limit: int) -> None:
    """Raise StartError where a checkpoint's weights alone would not fit."""
    nbytes = weight_bytes(directory)
    room = room_in(limit)
    if nbytes > room:
        raise StartError(
            f"MODEL_PATH is {source!r}, whose weights are {nbytes / GB:.1f} GB, and the model may "
            f"take {room / GB:.1f} GB on this machine. Use a smaller model or one of fewer bits, "
            "or raise MEMORY_LIMIT_MB."
        )
