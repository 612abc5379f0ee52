"""Counts the tokens that a server's attention really reads, for `python -m scripts.bench peers`.

The benchmark puts it on the PYTHONPATH of every server. What a server says it found may not be
what it did. Every attention of every MLX model goes through one function, so the queries that it
is given, one token at a time left out, are the prefill: tokens x attention layers, which the bench
divides by what one token costs. A process's count is a file of its own, METER_DIR/<pid>, eight
bytes, mapped: it is read while the process computes.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import mmap
import os
import struct
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

COUNT = struct.Struct("<Q")


class Meter(importlib.abc.MetaPathFinder):
    """Wraps the attention of `mlx.core` once that is imported; whoever never does pays nothing.

    Owner: the thread that imports it, then the one that builds graphs.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "mlx.core":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_wrap(module: ModuleType) -> None:
                load(module)
                self.wrap(module)

            spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec

    def wrap(self, core: Any) -> None:
        """Have `core.fast.scaled_dot_product_attention` count its queries."""
        with open(os.path.join(self._directory, str(os.getpid())), "w+b") as file:
            file.truncate(COUNT.size)
            page = mmap.mmap(file.fileno(), COUNT.size)
        attend = core.fast.scaled_dot_product_attention

        def counted(queries: Any, *arguments: Any, **options: Any) -> Any:
            rows, _, tokens, _ = queries.shape
            if tokens > 1:
                COUNT.pack_into(page, 0, COUNT.unpack_from(page)[0] + rows * tokens)
            return attend(queries, *arguments, **options)

        core.fast.scaled_dot_product_attention = counted


if meter_directory := os.environ.get("METER_DIR"):
    sys.meta_path.insert(0, Meter(meter_directory))
