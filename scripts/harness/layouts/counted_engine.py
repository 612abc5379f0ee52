"""Stands in for the engine: forwards take simulated time and count tokens, and compute nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import mlx.core as mx
from mlx_lm.generate import generation_stream

from hearth.worker.engine.decode.batch import is_mergeable
from hearth.worker.engine.decode.batch_split import RowLength, regroup
from hearth.worker.engine.decode.decoder import (
    ROWS_MAX,
    Decoder,
    DecodingSequence as DecodingSequence,
    SampledToken,
)
from hearth.worker.engine.decode.sampler import SamplingParams
from hearth.worker.engine.engine import Engine
from scripts.harness.layouts.counted_layers import CountedCache
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.simulated_clock import SimulatedClock
from scripts.harness.mac.mac_hardware import Mac


class Speed(NamedTuple):
    """How fast a machine computes. Rough: simulated time decides only what waits for what."""

    bytes_per_s: float  # of memory
    operations_per_s: float  # in a prefill


# One Mac a size of memory, with the bytes of memory that it reads in a second and the operations
# that it computes, both about as published.
MACS: Final = {
    16: (Mac("M2", 16), Speed(100e9, 5e12)),
    32: (Mac("M5", 32), Speed(153e9, 15e12)),
    48: (Mac("M4 Pro", 48), Speed(273e9, 15e12)),
    64: (Mac("M1 Max", 64), Speed(400e9, 18e12)),
    96: (Mac("M2 Max", 96), Speed(400e9, 24e12)),
    128: (Mac("M5 Max", 128), Speed(600e9, 60e12)),
    192: (Mac("M2 Ultra", 192), Speed(800e9, 48e12)),
    256: (Mac("M3 Ultra", 256), Speed(819e9, 50e12)),
    512: (Mac("M3 Ultra", 512), Speed(819e9, 50e12)),
}


class TimedDecoder(Decoder):
    """A Decoder whose steps take simulated time."""

    engine: "TimedEngine"

    def add(self, sequence: DecodingSequence) -> None:
        super().add(sequence)
        self.engine.pass_steps(1)

    def step(self) -> list[SampledToken]:
        sampled = super().step()
        self.engine.pass_steps(len(self._single) + len(self._batches))
        return sampled


class TimedEngine(Engine):
    """An Engine on a simulated clock; its model says what it is told to.

    Caches, arrays and forwards are the architecture's own: see `CountedEngine`, which has none.
    """

    decoder_class: type[TimedDecoder] = TimedDecoder

    def __init__(self, layout: ModelLayout, speed: Speed, clock: SimulatedClock) -> None:
        self.scripts: dict[str, list[int]] = {}  # by request, what is still to be said
        self.forwards: list[tuple[int, bool]] = []  # of prefills: tokens, and if for no request
        self.is_idle: Callable[[], bool] = lambda: False
        self._layout, self._speed, self._clock = layout, speed, clock
        super().__init__(layout.loaded())
        decoder = self.decoder_class(self._model, generation_stream, is_mergeable(self.probe()))
        decoder.engine = self
        self.decoder = decoder

    def pass_steps(self, count: int) -> None:
        """Let the time of so many decode steps pass."""
        self._clock.advance(self._layout.active_bytes / self._speed.bytes_per_s * count)

    def prefill(
        self, cache: list[Any], ids: list[int], images: Sequence[Any] = (), adapter: str = ""
    ) -> None:
        super().prefill(cache, ids, images, adapter)
        self.forwards.append((len(ids), self.is_idle()))
        read_s = self._layout.weight_bytes / self._speed.bytes_per_s  # nearly all experts
        computes = 2 * self._layout.active_count * len(ids)
        self._clock.advance(read_s + computes / self._speed.operations_per_s)

    def probe(self, tokens: int = 0) -> list[Any]:
        return self._layout.probe()

    def choice(self, key: str) -> SamplingParams:
        said = [*self.scripts[key], 0]  # decoding looks one ahead
        return SamplingParams(lambda _, places: mx.array([said[n] for n in places]), (), None)


class CountedDecoder(TimedDecoder):
    """Gives each sequence the tokens of its script. As in the real one, decoding looks one ahead.

    Who shares a step is decided as there; who does has lent its slot's cache, for good.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._sequences: dict[str, DecodingSequence] = {}  # with all tokens that were fed
        self._groups: list[list[str]] = []
        self._lent: set[str] = set()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def batch_bytes(self) -> int:
        return sum(self._sequences[key].cache[0].nbytes for key in self._lent)

    def add(self, sequence: DecodingSequence) -> None:
        fed = [*sequence.tokens, *sequence.tail]
        sequence.before_forward(len(fed))
        sequence.cache[0].offset = len(fed)
        self._sequences[sequence.request_id] = replace(sequence, tokens=fed)
        self._groups.append([sequence.request_id])
        self._is_changed = True
        self.engine.pass_steps(1)

    def step(self) -> list[SampledToken]:
        if self.is_mergeable and self._is_changed:
            self._regroup()
        sampled = []
        for key, sequence in self._sequences.items():
            if key not in self._lent:
                sequence.before_forward(len(sequence.tokens) + 1)
            sequence.tokens.append(self.engine.scripts[key].pop(0))
            sequence.cache[0].offset = len(sequence.tokens)
            sampled.append(SampledToken(key, sequence.tokens[-1], None))
        self.engine.pass_steps(len(self._groups))
        return sampled

    def remove(self, key: str, said: int | None = None) -> DecodingSequence | None:
        if (sequence := self._sequences.pop(key, None)) is None:
            return None
        self._groups = [kept for group in self._groups if (kept := [k for k in group if k != key])]
        self._is_changed = True
        if key in self._lent:
            self._lent.remove(key)
            sequence.cache[0].capacity = sequence.cache[0].offset
        return sequence

    def _regroup(self) -> None:
        """Have sequences share steps as reads the fewest bytes, where that pays."""
        self._is_changed = False
        lengths = [[RowLength(len(self._sequences[k].tokens)) for k in g] for g in self._groups]
        if (wanted := regroup(lengths, self.cost, ROWS_MAX)) is not None:
            keys = [key for group in self._groups for key in group]
            self._groups = [[keys[index] for index in group] for group in wanted]
        for key in [key for group in self._groups if len(group) > 1 for key in group]:
            if key not in self._lent:
                self._sequences[key].before_join()
                self._lent.add(key)


class CountedEngine(TimedEngine):
    """A TimedEngine over counted caches."""

    decoder_class = CountedDecoder

    def new_cache(self) -> list[Any]:
        return [CountedCache(self._layout.layers)]

    def _prefill(
        self,
        cache: list[Any],
        ids: list[int],
        images: Sequence[Any],
        adapter: str,
        *,
        keeps_hidden: bool = False,
    ) -> None:
        assert ids and not images, (len(ids), len(images))
        cache[0].offset += len(ids)
        assert cache[0].offset <= cache[0].capacity, (cache[0].offset, cache[0].capacity)
