"""Stands in for the engine: forwards take simulated time and count tokens, and compute nothing."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

from hearth.worker.engine.decode.batch_caches import is_mergeable
from hearth.worker.engine.decode.batch_split import ReadCost, RowLength, regroup
from hearth.worker.engine.decode.decoder import (
    ROWS_MAX,
    SampledToken,
    Sequence as DecodingSequence,
    UnfinishedBatch,
)
from hearth.worker.engine.decode.sampler import TokenChoice
from hearth.worker.engine.decode.shared_trunk import Trunk
from hearth.worker.engine.lora.lora_adapter import LoraAdapters
from hearth.worker.kv.layer_adapters import LayerMap
from scripts.harness.layouts.counted_layers import CountedLayerMap
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.simulated_clock import SimulatedClock
from scripts.harness.mac.mac_hardware import Mac


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a machine computes. Rough: simulated time decides only what waits for what."""

    bytes_per_s: float  # of memory
    operations_per_s: float  # in a prefill

    def prefill_s(self, layout: ModelLayout, tokens: int) -> float:
        read_s = layout.weight_bytes / self.bytes_per_s  # a chunk reads nearly all experts
        return read_s + 2 * layout.active_count * tokens / self.operations_per_s

    def step_s(self, layout: ModelLayout) -> float:
        return layout.active_bytes / self.bytes_per_s


# One Mac a size of memory, with the bytes of memory that it reads in a second and the operations
# that it computes, both about as published.
MACS: Final = {
    16: (Mac("M2", 16), Speed(100e9, 5e12)),
    32: (Mac("M5", 32), Speed(153e9, 15e12)),
    48: (Mac("M4 Pro", 48), Speed(273e9, 15e12)),
    64: (Mac("M1 Max", 64), Speed(400e9, 18e12)),
    128: (Mac("M5 Max", 128), Speed(600e9, 60e12)),
    512: (Mac("M3 Ultra", 512), Speed(819e9, 50e12)),
}


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward of a prefill."""

    tokens: int
    is_idle: bool  # for no request


class CountedDecoder:
    """Gives each sequence the tokens of its script. As in the real one, decoding looks one ahead.

    Who shares a step is decided as there; who does has lent its slot's cache, for good.
    """

    def __init__(
        self,
        layout: ModelLayout,
        speed: Speed,
        clock: SimulatedClock,
        scripts: dict[str, list[int]],
    ) -> None:
        """`scripts` has, by request, what is still to be said."""
        self.scripts = scripts
        self.is_mergeable = False
        self.trunks: dict[str, Trunk] = {}  # it counts none
        self.shares_trunks = False
        self.cost = ReadCost()
        self.has_room: Callable[[int], bool] = lambda _nbytes: True
        self._layout = layout
        self._step_s = speed.step_s(layout)
        self._clock = clock
        self._sequences: dict[str, DecodingSequence] = {}
        self._fed: dict[str, list[int]] = {}
        self._groups: list[list[str]] = []
        self._lent: set[str] = set()
        self._is_changed = False

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def batch_bytes(self) -> int:
        return sum(self._sequences[key].cache[0].nbytes for key in self._lent)

    def add(self, sequence: DecodingSequence) -> None:
        fed = [*sequence.tokens, *sequence.tail]
        sequence.before_forward(len(fed))
        sequence.cache[0].offset = len(fed)
        self._sequences[sequence.key], self._fed[sequence.key] = sequence, fed
        self._groups.append([sequence.key])
        self._is_changed = True
        self._clock.advance(self._step_s)

    def step(self) -> list[SampledToken]:
        if self.is_mergeable and self._is_changed:
            self._regroup()
        sampled = []
        for key, sequence in self._sequences.items():
            fed, token = self._fed[key], self.scripts[key].pop(0)
            if key not in self._lent:
                sequence.before_forward(len(fed) + 1)
            fed.append(token)
            sequence.cache[0].offset = len(fed)
            sampled.append(SampledToken(key, token, None))
        self._clock.advance(self._step_s * len(self._groups))
        return sampled

    def remove(self, key: str, said: int | None = None) -> UnfinishedBatch | None:
        sequence = self._sequences.pop(key, None)
        if sequence is None:
            return None
        self._groups = [kept for group in self._groups if (kept := [k for k in group if k != key])]
        self._is_changed = True
        if key in self._lent:
            self._lent.remove(key)
            sequence.cache[0].capacity = sequence.cache[0].offset
        return UnfinishedBatch(sequence.cache, self._fed.pop(key))

    def _regroup(self) -> None:
        """Have sequences share steps as reads the fewest bytes, where that pays."""
        self._is_changed = False
        lengths = [[RowLength(len(self._fed[key])) for key in group] for group in self._groups]
        wanted = regroup(lengths, self.cost, ROWS_MAX)
        if wanted is None:
            return
        keys = [key for group in self._groups for key in group]
        self._groups = [[keys[index] for index in group] for group in wanted]
        for group in self._groups:
            for key in group if len(group) > 1 else ():
                if key not in self._lent:
                    self._sequences[key].before_join()
                    self._lent.add(key)


class CountedEngine:
    """Has the interface of `Engine` over counted caches. `layers` is set once it is probed."""

    vision = None
    adapters = LoraAdapters()
    encoder_s = 0.0
    verifies_drafts = False  # what is said is scripted

    def __init__(self, layout: ModelLayout, speed: Speed, clock: SimulatedClock) -> None:
        self.scripts: dict[str, list[int]] = {}
        self.decoder = CountedDecoder(layout, speed, clock, self.scripts)
        self.forwards: list[Forward] = []
        self.layers: CountedLayerMap | None = None
        self.is_idle: Callable[[], bool] = lambda: False
        self._layout = layout
        self._speed = speed
        self._clock = clock

    def made(self, layers: LayerMap, batches: bool) -> None:
        """Take the layers that were found in the probe; sequences may share a decode step."""
        assert isinstance(layers, CountedLayerMap)
        self.layers = layers
        self.decoder.is_mergeable = batches and is_mergeable(self._layout.probe())
        self.decoder.cost = self._layout.read_cost

    def choice(self, key: str) -> TokenChoice:
        return TokenChoice(lambda x, _: x, (), None)  # the decoder knows what is said

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def probe(self) -> list[Any]:
        return self._layout.probe()

    def new_cache(self) -> list[Any]:
        assert self.layers is not None, "the KV manager has read the probe by now"
        return self.layers.new_cache()

    def synchronize(self) -> None:
        """Simulated time has passed for all that was asked."""

    def prefill(
        self, cache: list[Any], ids: list[int], images: Sequence[Any] = (), adapter: str = ""
    ) -> None:
        assert ids and not images and not adapter, (len(ids), len(images), adapter)
        cache[0].offset += len(ids)
        assert cache[0].offset <= cache[0].capacity, (cache[0].offset, cache[0].capacity)
        self.forwards.append(Forward(len(ids), self.is_idle()))
        self._clock.advance(self._speed.prefill_s(self._layout, len(ids)))

    def why_not_quantised(self, bits: int, group_size: int) -> str | None:
        return "it is counted"

    def release_images(self, spared: Any) -> bool:
        return False

    def has_encoded(self, images: Sequence[Any], start: int, end: int) -> bool:
        return True

    def shift(self, images: Sequence[Any], position: int) -> int:
        return 0
