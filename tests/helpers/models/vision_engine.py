"""Drives engines of the vision fixtures chunk by chunk, and compares what they keep."""

import random
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from hearth.worker.cache.image_keys import ImageRun, PromptImage
from hearth.worker.engine.decode import decoder
from hearth.worker.engine.decode.sampler import SamplingParams, greedy
from hearth.worker.engine.engine import Engine
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder
from hearth.worker.engine.vision.vlm_language_model import VLMLanguageModel
from hearth.worker.kv.layer_adapters import LayerMap
from scripts.harness.image_files import noise
from scripts.harness.socketless_worker import loaded
from scripts.harness.vision_worker import picture_of

PLENTY = 1 << 30
POSITION_MEMORY = ("_rope_deltas", "_position_ids")  # upstream's names
WITH_LOGPROBS = SamplingParams(sampler=greedy, processors=(), top_logprobs=1)

Arrays = list[np.ndarray[Any, Any]]


def new_vision(name: str, bytes_max: int = PLENTY) -> ImageEncoder:
    model = loaded(name)
    assert model.vision is not None
    return ImageEncoder(model.vision.model, model.model, bytes_max)


def new_engine(name: str, bytes_max: int = PLENTY) -> Engine:
    return Engine(loaded(name), vision=new_vision(name, bytes_max))


@cache
def picture(name: str, seed: int, width: int = 90, height: int = 120) -> PromptImage:
    return picture_of(loaded(name), noise(width, height, seed=seed))


def text(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(20, 3000) for _ in range(count)]


def feed(
    engine: Engine,
    cache: list[Any],
    ids: list[int],
    cuts: Iterable[int],
    runs: Sequence[ImageRun],
) -> list[Any]:
    """Prefill the stretches between `cuts`, the first of which the cache stands at."""
    for start, end in pairwise(cuts):
        engine.prefill(cache, ids[start:end], runs)
    return cache


def forget_positions(language: VLMLanguageModel) -> None:
    """Have mlx-vlm's model forget what it remembers of the request that it saw last."""
    for name in POSITION_MEMORY:
        setattr(language.model, name, None)


def remembers_positions(language: VLMLanguageModel) -> bool:
    return any(getattr(language.model, name) is not None for name in POSITION_MEMORY)


def cuts_of(count: int, chunk: int) -> list[int]:
    """Return every chunk's end; the prompt's last token is left to decoding."""
    return [*range(0, count - 1, chunk), count - 1]


def held(cache: list[Any]) -> Arrays:
    """Return copies of all that the layers hold: rows that are counted, and states."""
    arrays: Arrays = []
    for layer in cache:
        states = getattr(layer, "cache", None)
        wanted = states if states is not None else layer.state
        arrays += [np.array(array) for array in wanted]
    return arrays


def same(one: Arrays, other: Arrays) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def answer(
    engine: Engine, cache: list[Any], ids: list[int], runs: Sequence[ImageRun], count: int = 6
) -> tuple[list[int], Arrays]:
    """Return greedy tokens behind a prompt that is prefilled but for its last token.

    And the log probabilities that each came from.
    """
    shift = engine.vision.shift(runs, len(ids)) if engine.vision else 0
    sequence = decoder.DecodingSequence(
        "x", cache, ids[:-1], ids[-1:], WITH_LOGPROBS, tokens_max=count, shift=shift
    )
    engine.decoder.add(sequence)
    sampled = [engine.decoder.step()[0] for _ in range(count)]
    engine.decoder.remove("x")
    return [one.token_id for one in sampled], [np.array(one.logprobs) for one in sampled]


def restored(engine: Engine, cache: list[Any], position: int) -> list[Any]:
    """Return a new cache that holds what `cache` does, through what the KV manager keeps of it."""
    layers = LayerMap(engine.probe())
    fresh = engine.new_cache()
    with engine.stream():
        if layers.layout.has_rows:
            rows = layers.copy_rows(cache, 0, position, None)
            layers.put_rows(fresh, [rows.layers], position, position + 64)
        if layers.layout.window:
            window = layers.copy_window(cache, min(position, layers.window_held(cache)))
            layers.put_window(fresh, [window.layers], position)
        if layers.layout.has_state:
            layers.put_state(fresh, layers.take_state(cache), position)
    return fresh
