"""Runs the model's forwards: prefill by chunks, decode by steps. It knows tokens, not chat.

Owner: the inference thread, which also loaded the model.
"""

import functools
import logging
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from hearth.shared.errors import RequestError
from hearth.worker.cache.image_keys import ImageName, ImageRun, PromptImage
from hearth.worker.engine.decode.batch import is_mergeable
from hearth.worker.engine.decode.decoder import Decoder
from hearth.worker.engine.decode.draft_model import with_hidden
from hearth.worker.engine.decode.tree_forward import TreeForward
from hearth.worker.engine.decode.trunk_attention import reach_trunks
from hearth.worker.engine.lora.lora_adapter import applied
from hearth.worker.engine.mlx_memory import return_freed, unwire
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.model_trials import (
    batches_like_alone,
    make_tree_forward,
    trunks_like_alone,
    verifies_like_alone,
)
from hearth.worker.engine.prefill_lengths import network_of
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder
from hearth.worker.engine.vision.vlm_language_model import counted_depth

log = logging.getLogger(__name__)


class Engine:
    """One model and the caches that it fills.

    `prefill` leaves a cache that holds exactly the tokens it was given, evaluated, so that it may
    be dropped or continued at any chunk's end. `batches` allows sequences to share a forward,
    `trees` allows drafts with branches, where the model can compute them: it is tried.
    `vision` encodes images, if this model is given any. `packed` has the bits and the group size
    of rows that are quantised while it runs. What few need is tried when it is first needed, once:
    whether the model verifies drafts, and whether rows of a batch can share a trunk.
    Owner: the inference thread.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        batches: bool = True,
        vision: ImageEncoder | None = None,
        packed: tuple[int, int] | None = None,
        trees: bool = False,
    ) -> None:
        self.vision = vision
        self.adapters = loaded.adapters
        self._model = loaded.model
        batches = batches and is_mergeable(self.new_cache())
        tree_forward = None
        with self._trial():
            # Mlx-lm's own models batch in its own caches. What else there is has to be tried.
            if batches and loaded.vision is not None:
                batches = batches_like_alone(self._model, self.new_cache)
            if batches and packed is not None:
                new_cache = functools.partial(self._new_packed_cache, *packed)
                batches = batches_like_alone(self._model, new_cache)
            if trees and packed is None:
                tree_forward = make_tree_forward(self._model, self.new_cache)
        try_trunks = functools.partial(self._share_trunks, loaded)
        self.decoder = self._make_decoder(batches, tree_forward, try_trunks)

    def _make_decoder(
        self, batches: bool, tree_forward: TreeForward | None, try_trunks: Callable[[], bool]
    ) -> Decoder:
        return Decoder(self._model, generation_stream, batches, tree_forward, try_trunks)

    def stream(self) -> AbstractContextManager[Any]:
        """The stream that everything runs on: copies between streams wait for each other."""
        return mx.stream(generation_stream)

    def new_cache(self) -> list[Any]:
        """Return empty caches, one a layer, which take no memory before they are written."""
        return list(make_prompt_cache(self._model))

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Have the model compute what nobody asked for, and give the memory back."""
        with self.stream():
            yield
        mx.clear_cache()

    @functools.cached_property
    def verifies_drafts(self) -> bool:
        """Whether the model computes in one forward what it computes token by token. Tries it."""
        with self._trial():
            return verifies_like_alone(self._model, self.new_cache)

    def _share_trunks(self, loaded: LoadedModel) -> bool:
        """Let rows of a batch share a trunk, if this model computes the same with one. Tries it."""
        network = network_of(loaded)
        with self._trial():
            is_alike = trunks_like_alone(self._model, network, self.new_cache)
        if is_alike:
            reach_trunks(network)
        return is_alike

    def _new_packed_cache(self, bits: int, group_size: int) -> list[Any]:
        cache = self.new_cache()
        maybe_quantize_kv_cache(cache, 0, group_size, bits)
        return cache

    def probe(self) -> list[Any]:
        """Return caches that have seen three tokens: what the layers keep, and its dtype."""
        cache = self.new_cache()
        self.prefill(cache, [0, 0, 0])
        return cache

    def why_not_quantised(self, bits: int, group_size: int) -> str | None:
        """Return why KV cannot be quantised while it runs; None where it can. Tries it."""
        try:
            cache = self.probe()
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

    def encode(self, picture: PromptImage, spared: Container[ImageName] = ()) -> bool:
        """Have a picture encoded; say whether that was to be done. See `ImageEncoder.encode`.

        Raises:
            RequestError: 400, `image_refused`: it cannot be read any more, or the encoder, which
                took another one when it was loaded, does not take this one.
        """
        assert self.vision is not None, "a model of text alone is given no images"
        is_new = not self.vision.is_encoded(picture)
        try:
            self.vision.encode(picture, spared)
        except RequestError:
            raise
        except Exception as error:  # whatever an architecture or the device can raise
            self.vision.failures += 1
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            log.warning("an image of %d tokens cannot be encoded: %s", len(picture.ids), reason)
            raise RequestError(
                f"The model cannot encode the image of {len(picture.ids):,} tokens: {reason}. "
                "Send it smaller, or cut to what matters.",
                code="image_refused",
            ) from error
        return is_new

    @property
    def encoder_s(self) -> float:
        """Return the seconds that went into encoding images since the start."""
        return self.vision.encoder_seconds if self.vision is not None else 0.0

    def image_bytes(self, spared: Container[ImageName]) -> int:
        """Return the bytes of all encoded pictures but `spared`."""
        return self.vision.bytes_beside(spared) if self.vision is not None else 0

    def release_images(self, spared: Container[ImageName]) -> None:
        """Give up encoded pictures but for `spared`."""
        if self.vision is not None:
            self.vision.release(spared)

    def has_encoded(self, images: Sequence[ImageRun], start: int, end: int) -> bool:
        """Whether all images that the tokens [start, end) show are encoded."""
        shown = [run.image for run in images if run.start < end and start < run.end]
        if self.vision is None:
            return not shown
        return all(map(self.vision.is_encoded, shown))

    def shift(self, images: Sequence[ImageRun], position: int) -> int:
        """Return what positions differ from the number of tokens, behind `images`."""
        return self.vision.shift(images, position) if self.vision is not None else 0

    def synchronize(self) -> None:
        """Wait for what is computed ahead of what was asked: the next token of each answer."""
        mx.synchronize(generation_stream)

    def prefill(
        self,
        cache: list[Any],
        ids: list[int],
        images: Sequence[ImageRun] = (),
        adapter: str = "",
    ) -> None:
        """Feed `ids` in one forward and wait for its KV.

        `images` are all of the prompt, ascending, also those behind `ids` and those in the cache.
        """
        self._prefill(cache, ids, images, adapter)

    def prefill_with_hidden(
        self,
        cache: list[Any],
        ids: list[int],
        images: Sequence[ImageRun],
        adapter: str = "",
        *,
        tokens_max: int,
    ) -> mx.array:
        """Likewise, with the same KV; return hidden states (1, n, hidden), for a draft model.

        They are of the last `tokens_max` of `ids` at most.
        """
        hidden = self._prefill(cache, ids, images, adapter, keeps_hidden=True)
        assert hidden is not None
        kept = mx.contiguous(hidden[:, -tokens_max:])  # a view would pin all of them
        mx.eval(kept)
        return kept

    def _prefill(
        self,
        cache: list[Any],
        ids: list[int],
        images: Sequence[ImageRun],
        adapter: str,
        *,
        keeps_hidden: bool = False,
    ) -> mx.array | None:
        """Compute no more than the KV takes; return the hidden states, where they are asked for."""
        assert ids, "a forward of no tokens"
        before, hidden = counted_depth(cache), None
        with mx.stream(generation_stream), applied(self.adapters.of(adapter)):
            arguments: dict[str, Any] = {}
            if images:
                assert self.vision is not None, "a model of text alone is given no images"
                assert before is not None, "a model that sees has a layer that counts tokens"
                arguments = self.vision.model_arguments(ids, before, images)
            if keeps_hidden:
                _, hidden = with_hidden(self._model, mx.array(ids)[None], cache, **arguments)
            else:  # logits that are held would hold their inputs
                self._model(mx.array(ids)[None], cache=cache, **arguments)
            mx.eval([layer.state for layer in cache])
        after = counted_depth(cache)
        assert before is None or after == before + len(ids), (before, len(ids), after)
        return_freed()
        return hidden


def leave_device() -> None:
    """Wait for all that this thread has the device compute, and give up its memory and streams.

    A decoding sequence is computed one token ahead. Without the last the process aborts at its end.
    """
    mx.synchronize(generation_stream)
    unwire()
    mx.clear_streams()
