"""The model's forwards: prefill by chunks, decode by steps. Knows tokens, not chat.

Owner: the inference thread, which also loaded the model.
"""

from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from worker.engine.decode import Decoder
from worker.engine.model import LoadedModel, backend

CHUNK_CPU, CHUNK_GPU = 256, 512  # prompt tokens in one forward


def default_chunk() -> int:
    return CHUNK_CPU if backend() == "cpu" else CHUNK_GPU


class Engine:
    """One model and the caches that it fills.

    `prefill` leaves a cache that holds exactly the tokens it was given, evaluated, so that it may
    be dropped or continued at any chunk's end. `batches` allows sequences to share a forward.
    """

    def __init__(self, loaded: LoadedModel, batches: bool = True) -> None:
        self._model = loaded.model
        is_mergeable = batches and _is_mergeable(self.new_cache())
        self.decoder = Decoder(loaded.model, generation_stream, is_mergeable)

    def stream(self) -> AbstractContextManager[Any]:
        """The stream that everything runs on: copies between streams wait for each other."""
        context: AbstractContextManager[Any] = mx.stream(generation_stream)
        return context

    def new_cache(self) -> list[Any]:
        """Return empty caches, one a layer, which take no memory before they are written."""
        cache: list[Any] = make_prompt_cache(self._model)
        return cache

    def probe(self) -> list[Any]:
        """Return caches that have seen three tokens: what the layers keep, and its dtype."""
        cache = self.new_cache()
        self.prefill(cache, [0, 0, 0])
        return cache

    def why_not_quantised(self, bits: int, group_size: int) -> str | None:
        """Return why KV cannot be quantised while it runs; None where it can. Tries it."""
        cache = self.new_cache()
        try:
            self.prefill(cache, [0, 0, 0])
            maybe_quantize_kv_cache(cache, 0, group_size, bits)
            for layer in cache:
                kind = type(layer).__name__
                if kind not in ("QuantizedKVCache", "ArraysCache"):
                    return f"it keeps {kind}"
            self.prefill(cache, [0, 0])
            self.prefill(cache, [0])
        except Exception as error:  # whatever an architecture raises on packed KV
            return " ".join(str(error).split()) or type(error).__name__
        return None

    def prefill(self, cache: list[Any], ids: list[int]) -> None:
        """Feed `ids` in one forward and wait for its KV."""
        with mx.stream(generation_stream):
            self._model(mx.array(ids)[None], cache=cache)
            mx.eval([layer.state for layer in cache])
        mx.clear_cache()

    def close(self) -> None:
        """Let go of this thread's streams: without it the process aborts at its end."""
        mx.synchronize()
        mx.clear_streams()


def _is_mergeable(cache: list[Any]) -> bool:
    """Whether mlx-lm can put several of these caches into one batch."""
    return all(
        hasattr(layer, "merge") and _is_mergeable(list(getattr(layer, "caches", ())))
        for layer in cache
    )
