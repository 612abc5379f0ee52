"""Keeps mlx-lm from wiring memory of its own accord.

mlx-lm's BatchGenerator wires all that the device recommends when it is made, which is whenever two
requests begin to share forwards, and takes it back when it is closed: beyond MEMORY_LIMIT_MB, and
while others compute, which mlx-lm's own documentation of `wired_limit` forbids. No argument turns
it off. Its module's name for the function is replaced, once, when this module is imported.
"""

import importlib
from typing import Final

REPLACED: Final = "maybe_set_recommended_wired_limit"
_generate = importlib.import_module("mlx_lm.generate")  # mlx_lm.generate is its function


def _wires_nothing() -> None:
    """Return None, as where a device recommends nothing: then there is nothing to take back."""


assert hasattr(_generate, REPLACED), f"mlx-lm has no {REPLACED} any more"
setattr(_generate, REPLACED, _wires_nothing)
