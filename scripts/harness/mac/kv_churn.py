"""Replays on a Mac's imagined memory what serving a model allocates and frees."""

import random
from collections import deque
from typing import Final

from scripts.harness.mac.metal_memory import Buffer, MetalMemory
from scripts.harness.mac.real_model_sizes import RealModel

CHUNK: Final = 512  # tokens of one forward
ACTIVATIONS: Final = 4  # arrays of a chunk's hidden states that live at once
KEPT_MAX: Final = 24  # extents
SLOTS_MAX: Final = 2


class KVChurn:
    """Prefills chunk by chunk, keeps an extent and a snapshot at each cut, evicts the oldest."""

    def __init__(self, memory: MetalMemory, model: RealModel, chance: random.Random) -> None:
        self._memory = memory
        self._model = model
        self._chance = chance
        self._kept: deque[list[Buffer]] = deque()
        self._slots: deque[list[Buffer]] = deque()

    def run(self, chunks: int) -> None:
        """Read so many chunks, of prompts that take turns."""
        for _ in range(chunks):
            if not self._slots or self._chance.random() < 0.2:
                self._open_slot(self._chance.randrange(1, 64) * CHUNK)
            self._forward()
            self._keep()
            self._memory.clear_cache()

    def close(self) -> None:
        for buffers in [*self._slots, *self._kept]:
            self._free(buffers)
        self._slots.clear()
        self._kept.clear()
        self._memory.clear_cache()

    def _open_slot(self, tokens: int) -> None:
        if len(self._slots) == SLOTS_MAX:
            self._free(self._slots.popleft())
        self._slots.append(self._allocated([*self._model.extent(tokens)], "kv"))

    def _forward(self) -> None:
        hidden = CHUNK * self._model.hidden * 2
        self._free(self._allocated([hidden] * ACTIVATIONS, "forward"))

    def _keep(self) -> None:
        sizes = [*self._model.extent(CHUNK), *self._model.snapshot()]
        self._kept.append(self._allocated(sizes, "kv"))
        while len(self._kept) > self._chance.randrange(1, KEPT_MAX):
            self._free(self._kept.popleft())

    def _allocated(self, sizes: list[int], purpose: str) -> list[Buffer]:
        return [self._memory.malloc(nbytes, purpose) for nbytes in sizes]

    def _free(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            self._memory.free(buffer)
