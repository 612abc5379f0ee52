"""Leads a worker's memory, without a model, through a life on a Mac: load, serve, stop.

What is told to MLX is told by the worker's own parts; the arrays of a model of real size are
imagined.
"""

import random
from collections import deque
from pathlib import Path
from typing import Final
from unittest import mock

from hearth.shared.settings_from_env import load_settings
from hearth.worker.cache.prefill_grid import PrefillGrid
from hearth.worker.engine.footprint import MemoryUse
from hearth.worker.engine.forward_memory import ForwardMemory, forward_memory
from hearth.worker.engine.mlx_memory import unwire
from hearth.worker.engine.prefill_lengths import lengths_for
from hearth.worker.setup import encoder_memory
from hearth.worker.setup.encoder_memory import BESIDE_MAC_BYTES
from hearth.worker.setup.kv_room import KVRoom, divide_room
from hearth.worker.setup.memory_setup import WorkerMemory
from scripts.harness.layouts.counted_layers import CountedLayerMap
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.mac.fake_mac import FakeMac
from scripts.harness.mac.mac_hardware import MB, Mac
from scripts.harness.mac.metal_memory import Buffer, MetalMemory, load

KV_ITEM_BYTES: Final = 2
CHUNK: Final = 512  # tokens of one forward
ACTIVATIONS: Final = 4  # arrays of a chunk's hidden states that live at once
KEPT_MAX: Final = 24  # extents
SLOTS_MAX: Final = 2


class ImaginedWorker:
    """One worker process with a model of real size on a Mac."""

    def __init__(self, mac: Mac, model: ModelLayout, socket: Path, **settings: str) -> None:
        self.fake = FakeMac(mac, random.Random(1), is_imagined=True)
        self.model = model
        self._chance = random.Random(2)
        environ = {"MODEL_PATH": model.name} | settings
        with self.fake.installed(), mock.patch.object(encoder_memory, "backend", lambda: "metal"):
            self.memory = WorkerMemory(load_settings(environ, None), f"ipc://{socket}")
            self.memory.use = MemoryUse(self._process, self._arrays, self._freed)
        self._churn = KVChurn(self.fake.memory, model, self._chance)

    @property
    def limit(self) -> int:
        """What MLX was last told that it may hold."""
        return self.fake.memory.limit if self.fake.calls_of("set_memory_limit") else 0

    @property
    def forward(self) -> ForwardMemory:
        config = self.model.text_config
        has_experts = "num_experts_per_tok" in config
        lengths = lengths_for(
            config, "metal", "", has_experts=has_experts, keeps_states=self.model.is_hybrid
        )
        grid = PrefillGrid(lengths.chunk, lengths.step_min, lengths.full_to)
        return forward_memory(config, grid, KV_ITEM_BYTES, "metal")

    def start(self) -> None:
        """Load the model, with arrays that the loader frees again.

        Raises:
            StartError: it does not fit.
        """
        with self.fake.installed():
            self.memory.admit(sum(self.model.weights()))
            load(self.fake.memory, self.model.weights())
            for buffer in load(self.fake.memory, [200 * MB, 3 * MB], "loading"):
                self.fake.memory.free(buffer)
            self.memory.loaded(self.model.weights())

    def context(self) -> int:
        """Return the context that this worker would tell.

        Raises:
            StartError: hardly anything fits.
        """
        with self.fake.installed():
            fitted = self.memory.fit(self.model.loaded(), self.model.slot_bytes, self.forward)
        return fitted.facts.context_tokens

    def room(self, context: int) -> KVRoom:
        """Return how what the model leaves is divided, where it tells this context."""
        memory = self.memory
        with self.fake.installed():
            return divide_room(
                *(memory.share.limit, memory.use.bytes_used(), self.model.slot_bytes(context)),
                *(self.forward.bytes_at(context), memory.use.overhead),
            )

    def serve(self, chunks: int) -> None:
        """Read so many chunks, and look at what the other workers take."""
        with self.fake.installed():
            self._churn.run(chunks)
            self.memory.measure()

    def stop(self) -> None:
        with self.fake.installed():
            self._churn.close()
            unwire()
            self.memory.end()

    def _process(self) -> int:
        return BESIDE_MAC_BYTES + self._arrays()

    def _arrays(self) -> int:
        return self.fake.memory.active_bytes

    def _freed(self) -> int:
        return self.fake.memory.cached_bytes


class KVChurn:
    """Prefills chunk by chunk, keeps an extent and a snapshot at each cut, evicts the oldest."""

    def __init__(self, memory: MetalMemory, model: ModelLayout, chance: random.Random) -> None:
        self._memory = memory
        self._hidden_bytes = CHUNK * model.text_config["hidden_size"] * 2
        self._layers = CountedLayerMap(model.probe())
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
        self._slots.append(self._allocated(self._rows(tokens), "kv"))

    def _forward(self) -> None:
        self._free(self._allocated([self._hidden_bytes] * ACTIVATIONS, "forward"))

    def _keep(self) -> None:
        state = self._layers.take_state(self._layers.new_cache())
        sizes = [array.nbytes for layer in state.layers for array in layer if array is not None]
        self._kept.append(self._allocated(self._rows(CHUNK) + sizes, "kv"))
        while len(self._kept) > self._chance.randrange(1, KEPT_MAX):
            self._free(self._kept.popleft())

    def _rows(self, tokens: int) -> list[int]:
        """Return the bytes of the arrays that are kept of a run of tokens."""
        (cache,) = self._layers.new_cache()
        cache.offset = tokens
        rows = self._layers.copy_rows([cache], 0, tokens, None)
        return [array.nbytes for layer in rows.layers for array in layer.arrays]

    def _allocated(self, sizes: list[int], purpose: str) -> list[Buffer]:
        return [self._memory.malloc(nbytes, purpose) for nbytes in sizes]

    def _free(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            self._memory.free(buffer)
