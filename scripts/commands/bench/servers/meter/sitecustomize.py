"""Counts the tokens that a server's attention really reads, for `hearth bench`.

The benchmark puts this folder on the PYTHONPATH of every server that runs in Python. What a server
says that it found in its cache may not be what it did. Every attention of every MLX model goes
through one function (and, where Hearth attends what sequences share, through one of its own), so
the queries that it is given are what is computed. They are counted by the shape of the heads: that
of a vision tower differs from that of the text model. A process's counts are a file of its own
in METER_DIR, mapped into its memory: it is read while the process computes.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Query heads, KV heads and width of a head; rows that were read; calls.
SLOT = struct.Struct("<5Q")
SLOTS = 16  # shapes of one process; those beyond are not counted


class CountFile:
    """The counts of this process. Owner: the thread that builds graphs."""

    def __init__(self, directory: str) -> None:
        name = f"{os.getpid()}-{time.time_ns()}"
        with open(os.path.join(directory, name), "w+b") as file:
            file.truncate(SLOT.size * SLOTS)
            self._page = mmap.mmap(file.fileno(), SLOT.size * SLOTS)
        self._slots: dict[tuple[int, int, int], int] = {}

    def count(self, queries: Any, keys: Any) -> None:
        """Note one call: one query a row is a step of decoding, more of them are read."""
        rows, heads, tokens, width = queries.shape
        shape = heads, keys.shape[1], width
        if shape not in self._slots:
            if len(self._slots) == SLOTS:
                return
            self._slots[shape] = len(self._slots) * SLOT.size
        place = self._slots[shape]
        *_, read, calls = SLOT.unpack_from(self._page, place)
        read += rows * tokens if tokens > 1 else 0
        SLOT.pack_into(self._page, place, *shape, read, calls + 1)


class AttentionWrapper(importlib.abc.MetaPathFinder):
    """Wraps the attention of modules once they are imported; whoever never does pays nothing."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file: CountFile | None = None
        self._wraps: dict[str, Callable[[Any], None]] = {
            "mlx.core": lambda core: self.wrap(core.fast, "scaled_dot_product_attention"),
            # What Hearth attends without MLX's function.
            "hearth.worker.engine.decode.trunk_attention": lambda module: self.wrap(
                module, "attend_with_trunks"
            ),
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        wrap = self._wraps.pop(fullname, None)  # before it is looked up: that comes by here again
        if wrap is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_wrap(module: ModuleType) -> None:
                load(module)
                wrap(module)

            spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec

    def wrap(self, owner: Any, name: str) -> None:
        """Have the function `name` of `owner` count its queries; keys come behind them."""
        if self._file is None:
            self._file = CountFile(self._directory)
        file, attend = self._file, getattr(owner, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            queries, keys, *_ = (*arguments, *options.values())
            file.count(queries, keys)
            return attend(*arguments, **options)

        setattr(owner, name, counted)


if meter_directory := os.environ.get("METER_DIR"):
    sys.meta_path.insert(0, AttentionWrapper(meter_directory))
