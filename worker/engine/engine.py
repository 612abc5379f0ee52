"""Runs the model's forwards: prefill in chunks, decode in steps. It knows tokens, not chats.

Owner: the inference thread, which also loaded the model.
"""

import functools
import logging
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import generation_stream, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from hearth.shared.errors import RequestError
from hearth.worker.cache.image_keys import ImageName, ImageRun, PromptImage
from hearth.worker.engine.decode.batch import is_mergeable, pads_exactly
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

PROBE_TOKENS: Final = 3


class Engine:
    """Runs one model: prefills caches, encodes images, and has the decoder.

    After each chunk the cache holds exactly the tokens that `prefill` was given, all evaluated, so
    that the prefill can be dropped or continued from that point. `batches` allows sequences to
    share a forward, and `trees` allows drafts with branches; both only if a trial finds that the
    model computes them correctly. `vision` encodes images, if the model takes any. `packed` has
    the bits and the group size of KV that is quantised while the model runs.
    Two trials are made once, when first needed: whether the model verifies drafts, and whether the
    rows of a batch can share a trunk.
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
        network = network_of(loaded)
        batches = batches and pads_exactly(network) and is_mergeable(self.new_cache())
        tree_forward = None
        with self._trial():
            # Mlx-lm's models are known to batch in mlx-lm's caches. All others are tried.
            if batches and loaded.is_of_mlx_vlm:
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
        """Return the context of the one stream that everything runs on.

        Copies between streams would wait for each other.
        """
        return mx.stream(generation_stream)

    def new_cache(self) -> list[Any]:
        """Return empty caches, one for each layer. They take no memory before they are written."""
        return list(make_prompt_cache(self._model))

    @contextmanager
    def _trial(self) -> Iterator[None]:
        """Run a trial on the engine's stream, and free its memory afterwards."""
        with self.stream():
            yield
        mx.clear_cache()

    @functools.cached_property
    def verifies_drafts(self) -> bool:
        """Whether a forward of several tokens gives the logits of single tokens. Runs a trial."""
        with self._trial():
            return verifies_like_alone(self._model, self.new_cache)

    def _share_trunks(self, loaded: LoadedModel) -> bool:
        """Let batch rows share a trunk, if a trial finds the same logits; return whether it did."""
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

    def probe(self, tokens: int = PROBE_TOKENS) -> list[Any]:
        """Return caches of some tokens, from which each layer's class and dtype can be read."""
        cache = self.new_cache()
        self.prefill(cache, [0] * max(tokens, PROBE_TOKENS))
        return cache

    def why_not_quantised(self, bits: int, group_size: int) -> str | None:
        """Return why KV cannot be quantised while the model runs; None if it can. Runs a trial."""
        try:
            cache = self.probe()
            for layer in cache:  # those that `LayerMap.quantise` packs, or states
                kind = type(layer).__name__
                if kind not in ("KVCache", "ArraysCache"):
                    return f"it keeps {kind}"
            maybe_quantize_kv_cache(cache, 0, group_size, bits)
            self.prefill(cache, [0, 0])
            self.prefill(cache, [0])
        except Exception as error:  # any error of an architecture with quantised KV
            return " ".join(str(error).split()) or type(error).__name__
        return None

    def encode(self, image: PromptImage, spared: Container[ImageName] = ()) -> bool:
        """Encode an image, unless it is encoded; return whether it was new. See `ImageEncoder`.

        Raises:
            RequestError: 400, `image_refused`: the image's data is gone, or the encoder fails.
        """
        assert self.vision is not None, "a text-only model got an image"
        is_new = not self.vision.is_encoded(image)
        try:
            self.vision.encode(image, spared)
        except RequestError:
            raise
        except Exception as error:  # any error of an architecture or the device
            self.vision.failures += 1
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            log.warning("an image of %d tokens cannot be encoded: %s", len(image.ids), reason)
            raise RequestError(
                f"The model cannot encode the image of {len(image.ids):,} tokens: {reason}. "
                "Send it smaller, or cut to what matters.",
                code="image_refused",
            ) from error
        return is_new

    @property
    def encoder_s(self) -> float:
        """The seconds spent on encoding images since the start."""
        return self.vision.encoder_seconds if self.vision is not None else 0.0

    def image_bytes(self, spared: Container[ImageName]) -> int:
        """Return the bytes of all encoded images except `spared`."""
        return self.vision.bytes_beside(spared) if self.vision is not None else 0

    def release_images(self, spared: Container[ImageName]) -> None:
        """Drop all encoded images except `spared`."""
        if self.vision is not None:
            self.vision.release(spared)

    def has_encoded(self, images: Sequence[ImageRun], start: int, end: int) -> bool:
        """Whether all images among the tokens [start, end) are encoded."""
        shown = [run.image for run in images if run.start < end and start < run.end]
        if self.vision is None:
            return not shown
        return all(map(self.vision.is_encoded, shown))

    def shift(self, images: Sequence[ImageRun], position: int) -> int:
        """Return what to add to `position`, a number of tokens, to get the model's position."""
        return self.vision.shift(images, position) if self.vision is not None else 0

    def synchronize(self) -> None:
        """Wait for the forwards in flight: decoding computes one token ahead."""
        mx.synchronize(generation_stream)

    def prefill(
        self,
        cache: list[Any],
        ids: list[int],
        images: Sequence[ImageRun] = (),
        adapter: str = "",
    ) -> None:
        """Feed `ids` in one forward and wait for its KV.

        `images` are all images of the prompt in order, also those before and after `ids`.
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
        """Prefill, and return hidden states (1, n, hidden) for a draft model. The KV is the same.

        The hidden states are those of the last `tokens_max` ids at most.
        """
        hidden = self._prefill(cache, ids, images, adapter, keeps_hidden=True)
        assert hidden is not None
        kept = mx.contiguous(hidden[:, -tokens_max:])  # a view would keep all of them in memory
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
        """Compute the KV, and no logits; return the hidden states if `keeps_hidden`."""
        assert ids, "a forward of no tokens"
        before, hidden = counted_depth(cache), None
        with mx.stream(generation_stream), applied(self.adapters.of(adapter)):
            arguments: dict[str, Any] = {}
            if images:
                assert self.vision is not None, "a text-only model got an image"
                assert before is not None, "no layer of this vision model counts tokens"
                arguments = self.vision.model_arguments(ids, before, images)
            if keeps_hidden:
                _, hidden = with_hidden(self._model, mx.array(ids)[None], cache, **arguments)
            else:  # the lazy logits are dropped: they would keep their inputs in memory
                self._model(mx.array(ids)[None], cache=cache, **arguments)
            mx.eval([layer.state for layer in cache])
        after = counted_depth(cache)
        assert before is None or after == before + len(ids), (before, len(ids), after)
        return_freed()
        return hidden


def leave_device() -> None:
    """Wait for this thread's work on the device, and release wired memory and streams.

    Decoding computes one token ahead, so work may be in flight. Without `clear_streams` the process
    aborts at its end.
    """
    mx.synchronize(generation_stream)
    unwire()
    mx.clear_streams()
