"""Leads a worker's memory, without a model, through a life on a Mac: load, serve, stop.

What is told to MLX is told by the worker's own parts; the arrays of a model of real size are
imagined.
"""

import random
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from unittest import mock

from hearth.shared.settings import load_settings
from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.engine.forward_memory import ForwardMemory, forward_of
from hearth.worker.engine.mlx_memory import unwire
from hearth.worker.engine.prefill_lengths import lengths_for
from hearth.worker.engine.system_state import MemoryUse
from hearth.worker.setup import memory_setup
from hearth.worker.setup.memory_setup import KVRoom, WorkerMemory, divide_room
from scripts.harness.layouts.counted_layers import CountedCache, CountedLayerMap
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.mac.fake_mac import FakeMac
from scripts.harness.mac.mac_hardware import MB, Mac
from scripts.harness.mac.metal_memory import Buffer, load

CHUNK: Final = 512  # tokens of one forward
ACTIVATIONS: Final = 4  # arrays of a chunk's hidden states that live at once
KEPT_MAX: Final = 24  # extents
SLOTS_MAX: Final = 2


class ImaginedWorker:
    """One worker process with a model of real size on a Mac."""

    def __init__(self, mac: Mac, model: ModelLayout, socket: Path, **settings: str) -> None:
        self.fake = FakeMac(mac, random.Random(1), is_imagined=True)
        self.model = model
        environ, held = {"MODEL_PATH": model.name} | settings, self.fake.memory
        with self.fake.installed(), mock.patch.object(memory_setup, "backend", lambda: "metal"):
            self.memory = WorkerMemory(load_settings(environ, None), f"ipc://{socket}")
            self.memory.use = MemoryUse(
                lambda: memory_setup.BESIDE_MAC_BYTES + held.active_bytes,
                lambda: held.active_bytes,
                lambda: held.cached_bytes,
            )
        self._chance = random.Random(2)
        self._layers = CountedLayerMap(model.probe())
        self._kept: deque[list[Buffer]] = deque()
        self._slots: deque[list[Buffer]] = deque()

    @property
    def limit(self) -> int:
        """What MLX was last told that it may hold."""
        return self.fake.memory.limit if self.fake.calls_of("set_memory_limit") else 0

    @property
    def forward(self) -> ForwardMemory:
        lengths = lengths_for(
            *(self.model.text_config, "metal", ""),
            has_experts="num_experts_per_tok" in self.model.text_config,
            keeps_states=self.model.is_hybrid,
        )
        return forward_of(
            self.model.loaded(), PrefillGrid(lengths.chunk, lengths.step_min, lengths.full_to)
        )

    def start(self) -> None:
        """Load the model, with arrays that the loader frees again.

        Raises:
            StartError: it does not fit.
        """
        with self.fake.installed():
            self.memory.admit(sum(self.model.weights()))
            load(self.fake.memory, self.model.weights())
            self._free(load(self.fake.memory, [200 * MB, 3 * MB], "loading"))
            self.memory.loaded(self.model.weights())

    def context(self) -> int:
        """Return the context that this worker would tell.

        Raises:
            StartError: hardly anything fits.
        """
        with self.fake.installed():
            return self.memory.fit(
                self.model.loaded(), self.model.slot_bytes, self.forward
            ).facts.context_tokens

    def room(self, context: int) -> KVRoom:
        """Return how what the model leaves is divided, where it tells this context."""
        with self.fake.installed():
            return divide_room(
                *(self.memory.share.limit, self.memory.use.bytes_used()),
                *(self.model.slot_bytes(context), self.forward.bytes_at(context)),
                self.memory.use.overhead,
            )

    def serve(self, chunks: int) -> None:
        """Read so many chunks, of prompts that take turns; look at what the other workers take.

        At each cut an extent and a snapshot are kept, and the oldest ones are evicted.
        """
        memory, chance = self.fake.memory, self._chance
        states = [
            array.nbytes
            for layer in self._layers.take_state([]).layers
            for array in layer
            if array is not None
        ]
        hidden = [CHUNK * self.model.text_config["hidden_size"] * 2] * ACTIVATIONS
        with self.fake.installed():
            for _ in range(chunks):
                if not self._slots or chance.random() < 0.2:
                    if len(self._slots) == SLOTS_MAX:
                        self._free(self._slots.popleft())
                    self._slots.append(
                        load(memory, self._rows(chance.randrange(1, 64) * CHUNK), "kv")
                    )
                self._free(load(memory, hidden, "forward"))
                self._kept.append(load(memory, self._rows(CHUNK) + states, "kv"))
                while len(self._kept) > chance.randrange(1, KEPT_MAX):
                    self._free(self._kept.popleft())
                memory.clear_cache()
            self.memory.measure()

    def stop(self) -> None:
        with self.fake.installed():
            self._free(buffer for buffers in [*self._slots, *self._kept] for buffer in buffers)
            self.fake.memory.clear_cache()
            unwire()
            self.memory.share.release()

    def _rows(self, tokens: int) -> list[int]:
        """Return the bytes of the arrays that are kept of a run of tokens."""
        rows = self._layers.copy_rows([CountedCache(self._layers, tokens)], 0, tokens, None)
        return [array.nbytes for layer in rows.layers for array in layer.arrays]

    def _free(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            self.fake.memory.free(buffer)
