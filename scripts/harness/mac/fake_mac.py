"""Stands for a Mac in a process that has none: what MLX is told of its memory is recorded.

Arrays and forwards stay MLX's own, on this machine's processor. `installed` replaces the functions
of `mlx.core` that a Mac would answer otherwise, and puts them back at its end. What a model of real
size would allocate is imagined: then MLX's counts are those of the imagined buffers.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import mlx.core as mx

from scripts.harness.mac.mac_hardware import Mac
from scripts.harness.mac.metal_memory import Buffer, MetalMemory


@dataclass(frozen=True, slots=True)
class MemoryCall:
    """One call that moved a limit of MLX."""

    name: str  # "set_wired_limit" or "set_memory_limit"
    nbytes: int
    is_computing: bool  # an asynchronous evaluation may have been in flight
    thread: str


class FakeMac:
    """One process's view of a Mac. Owner: the test."""

    def __init__(
        self, mac: Mac, chance: random.Random | None = None, is_imagined: bool = False
    ) -> None:
        """`is_imagined`: MLX tells of `memory`'s buffers, not of its own arrays."""
        self.mac = mac
        self.memory = MetalMemory(mac, chance)
        self.calls: list[MemoryCall] = []
        self._is_imagined = is_imagined
        self._computing: set[str] = set()  # streams with work that nobody has waited for
        self._thread = threading.local()  # `is_bare`: its streams are gone, Metal finds none
        self._arrays: dict[int, tuple[int, Buffer]] = {}  # id -> size, buffer

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Have `mlx.core` answer as on this Mac within the block."""
        with mock.patch.multiple(mx, **self._functions()):
            yield

    def calls_of(self, name: str) -> list[int]:
        """Return what limit each call of this name set, in order."""
        return [call.nbytes for call in self.calls if call.name == name]

    def follow(self, arrays: Iterable[mx.array], purpose: str) -> None:
        """Allocate a buffer for each array of `purpose` that is new, free those that are gone."""
        now = {id(array): array.nbytes for array in arrays if array.nbytes}
        for name, (nbytes, buffer) in list(self._arrays.items()):
            if buffer.purpose == purpose and now.get(name) != nbytes:
                self.memory.free(buffer)
                del self._arrays[name]
        self._arrays |= {
            name: (nbytes, self.memory.malloc(nbytes, purpose))
            for name, nbytes in now.items()
            if name not in self._arrays
        }

    def _functions(self) -> dict[str, Any]:
        memory, computing, thread = self.memory, self._computing, self._thread
        evaluate, wait, clear = mx.async_eval, mx.synchronize, mx.clear_cache
        clear_streams = mx.clear_streams

        def async_eval(*arrays: Any) -> None:
            computing.add(_name())
            evaluate(*arrays)  # type: ignore[no-untyped-call]

        def synchronize(stream: Any = None) -> None:
            if getattr(thread, "is_bare", False):
                raise RuntimeError("There is no Stream(gpu, 0) in current thread.")
            wait(*([] if stream is None else [stream]))
            computing.discard(_name(stream))

        def clear_all_streams() -> None:
            clear_streams()  # Metal waits for each before it goes
            computing.clear()
            thread.is_bare = True

        def clear_cache() -> None:
            clear()
            memory.clear_cache()

        told = {
            "get_active_memory": lambda: memory.active_bytes,
            "get_cache_memory": lambda: memory.cached_bytes,
        }
        return {
            "device_info": self.mac.device_info,
            "set_wired_limit": partial(self._call, "set_wired_limit", memory.set_wired_limit),
            "set_memory_limit": partial(self._call, "set_memory_limit", memory.set_limit),
            "get_memory_limit": lambda: memory.limit,
            "async_eval": async_eval,
            "synchronize": synchronize,
            "clear_streams": clear_all_streams,
            "clear_cache": clear_cache,
            **(told if self._is_imagined else {}),
        }

    def _call(self, name: str, act: Callable[[int], int], limit: int) -> int:
        thread = threading.current_thread().name
        self.calls.append(MemoryCall(name, int(limit), bool(self._computing), thread))
        return act(int(limit))


def _name(stream: Any = None) -> str:
    """Name a stream, or this thread's default one; mlx-lm's own stands for one in each thread."""
    with contextlib.nullcontext() if stream is None else mx.stream(stream):
        return str(mx.default_stream(mx.default_device()))
