"""Imports mlx-lm without letting it set the limit of open files.

mlx_lm.utils sets the limit to (2048, 4096) when it is imported: where the hard limit is lower, and
the process may not raise it, the import fails, and where it is higher, it falls for good. What
this process needs it takes itself (shared/open_files.py). Imported before all else of mlx-lm.
"""

import importlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SETTER: Final = "mlx_lm.utils"  # a test fails once it sets no limit any more


@contextmanager
def limits_stay() -> Iterator[list[tuple[int, tuple[int, int]]]]:
    """Have `resource.setrlimit` do nothing, and note what it was asked for."""
    asked: list[tuple[int, tuple[int, int]]] = []
    setrlimit = resource.setrlimit
    resource.setrlimit = lambda which, limits: asked.append((which, limits))
    try:
        yield asked
    finally:
        resource.setrlimit = setrlimit


with limits_stay() as asked_for:
    importlib.import_module(SETTER)
