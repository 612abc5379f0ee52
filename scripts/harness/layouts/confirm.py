"""Confirms counted runs with arrays: a small model whose rows and states have a true ratio.

The same session is played twice on the same simulated clock: counted, and with MLX's arrays, real
forwards, real decoding and files with bytes in them. Both must come to the same figures.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from unittest import mock

import mlx.core as mx

from hearth.worker.disk import open_file_store
from hearth.worker.engine.decode.decoder import Decoder, SampledToken, Sequence as DecodingSequence
from hearth.worker.engine.decode.sampler import TokenChoice
from hearth.worker.engine.engine import Engine
from hearth.worker.kv.layer_adapters import LayerMap
from scripts.harness.layouts.counted_engine import MACS, CountedEngine, Forward, Speed
from scripts.harness.layouts.counted_worker import (
    CountedWorker,
    counted,
    settings_of,
)
from scripts.harness.layouts.model_layouts import ModelLayout
from scripts.harness.layouts.session_scripts import SessionScript
from scripts.harness.layouts.simulated_clock import SimulatedClock

QUIET_S: Final = 60.0
MAC_GB: Final = 64
CACHE_MB: Final = 8_192  # of the real model's kept KV
VOCABULARY: Final = 3_072  # of the fixtures' tokenizers

_SMALL: Final = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
}
# Small models by the real one that each stands for: fewer and narrower layers, so many that a state
# is worth about as many tokens' rows.
SMALL: Final = {
    "Qwen3.5-27B": ModelLayout(
        "like Qwen3.5-27B",
        "",
        {
            "model_type": "qwen3_5",
            "text_config": _SMALL
            | {
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 6,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
                "linear_conv_kernel_dim": 4,
                "full_attention_interval": 4,
                "tie_word_embeddings": True,
            },
        },
    ),
}


class TimedDecoder(Decoder):
    """A Decoder whose steps take simulated time."""

    clock: SimulatedClock
    step_s: float

    def add(self, sequence: DecodingSequence) -> None:
        super().add(sequence)
        self.clock.advance(self.step_s)

    def step(self) -> list[SampledToken]:
        sampled = super().step()
        alone = len(self._lone)
        self.clock.advance(self.step_s * (alone + len(self._batches)))
        return sampled


class ArrayEngine(Engine):
    """An Engine with arrays on a simulated clock; its model says what it is told to."""

    def __init__(self, layout: ModelLayout, speed: Speed, clock: SimulatedClock) -> None:
        mx.eval(layout.model.parameters())
        super().__init__(layout.loaded())
        self.scripts: dict[str, list[int]] = {}
        self.forwards: list[Forward] = []
        self.is_idle: Callable[[], bool] = lambda: False
        self._layout, self._speed, self._clock = layout, speed, clock

    def made(self, layers: LayerMap, batches: bool) -> None:
        """Make the decoder: sequences may share a step, where mlx-lm can merge such caches."""
        decoder = TimedDecoder(self._model, None, batches and self.decoder.is_mergeable)
        decoder._stream = self.decoder._stream
        decoder.cost = self._layout.read_cost
        decoder.clock, decoder.step_s = self._clock, self._speed.step_s(self._layout)
        self.decoder = decoder

    def prefill(
        self, cache: list[Any], ids: list[int], images: Sequence[Any] = (), adapter: str = ""
    ) -> None:
        super().prefill(cache, ids, images, adapter)
        self.forwards.append(Forward(len(ids), self.is_idle()))
        self._clock.advance(self._speed.prefill_s(self._layout, len(ids)))

    def probe(self) -> list[Any]:
        cache = self.new_cache()
        super().prefill(cache, [0, 0, 0])
        return cache

    def choice(self, key: str) -> TokenChoice:
        script = self.scripts[key]
        last = len(script) - 1  # decoding looks one ahead
        return TokenChoice(lambda _, at: mx.array([script[min(n, last)] for n in at]), (), None)


@contextlib.contextmanager
def scaled(layout: ModelLayout, real: ModelLayout) -> Iterator[Mapping[str, str]]:
    """Scale the budgets of RAM and disk to the small layout; yield the settings that say so."""
    scale = real.layers.row_bytes // layout.layers.row_bytes
    megabytes = max(1, CACHE_MB // scale)
    with mock.patch.object(open_file_store, "GB", 1024**3 // scale):
        yield {"CACHE_RAM_BUDGET_MB": str(megabytes)}


def confirmed(
    layout: ModelLayout, real: ModelLayout, session: SessionScript
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of a session played counted, and of the same with arrays."""
    with scaled(layout, real) as settings:
        return _played(layout, session, settings, False), _played(layout, session, settings, True)


def _played(
    layout: ModelLayout, session: SessionScript, settings: Mapping[str, str], has_arrays: bool
) -> dict[str, Any]:
    mac, speed = MACS[MAC_GB]
    with counted(mac, has_arrays) as (clock, disk, directory):
        engine: Any = (ArrayEngine if has_arrays else CountedEngine)(layout, speed, clock)
        made = settings_of(directory, settings)
        with engine.stream():
            told = []
            for _ in range(2):  # the second one begins with what the first has left on disk
                worker = CountedWorker(layout, clock, engine, made, session.marks)
                worker.play(session, 0.0, QUIET_S)
                worker.stop()
                told.append(_told(worker))
        return {
            "written": dict(disk.written),
            "read": dict(disk.read),
            "forwards": [forward.tokens for forward in engine.forwards],
            "before and after a restart": told,
        }


def _told(worker: CountedWorker) -> dict[str, Any]:
    return {
        "kept_bytes_max": worker.kept_bytes_max,
        "prefilled": [usage.prefilled_tokens for usage in worker.answered.values()],
        "idle": worker.scheduler.idle_tokens,
        "evictions": worker.manager.evictions,
    }
