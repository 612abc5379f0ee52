"""Checks, when a model is loaded, that it reads images as mlx-vlm has it read them.

Owner: the inference thread.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from numpy.typing import NDArray

from hearth.worker.cache.image_keys import ImageRun, PromptImage
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.vision.image_encoding_and_positions import ImageEncoder

log = logging.getLogger(__name__)

# Errors are 1 less the correlation of logits. Cutting a prompt anew rounds anew, in few bits by
# much, so an image may err by some of what text does that is cut in the same places. In fp32 that
# is nothing, and a position that is off by one errs by 3e-4 or more. Several texts are tried: the
# routers of one with experts choose others where two are nearly tied, which no text has always.
ERROR_MAX: Final = 1e-4
TEXT_ERRORS_MAX: Final = 10
TEXTS: Final = 3
_UNLIKE: Final = "it answers otherwise than mlx-vlm where the text before them is forwarded alone"
_ONE_FORWARD: Final = (
    "mlx-vlm reads a prompt with an image in one forward alone, as tokens in it attend to later "
    "ones, so that no part of it could be kept for the next turn"
)
BEFORE, BEHIND = "Here is a picture:", "What does it show? Tell me in a few words."


def checked_vision(
    loaded: LoadedModel, picture: PromptImage, bytes_max: int
) -> ImageEncoder | None:
    """Return what gives this model images; None, with one warning, where they would be misread.

    `picture` is any small one, as the model's processor made it.
    """
    assert loaded.vision is not None, "a model without a vision tower is given no images"
    prompt = _TestPrompt(loaded, picture)
    splits = reads = False
    try:
        with mx.stream(generation_stream):
            reason = prompt.needs_one_forward()
            if not reason:
                splits = prompt.is_read_alike(in_two=True)
                reads = splits or prompt.is_read_alike(in_two=False)
                reason = _UNLIKE
    except Exception as error:  # whatever an architecture raises on what it was not made for
        reads, reason = False, " ".join(str(error).split()) or type(error).__name__
    mx.clear_cache()
    if not reads:
        log.warning(
            "images are refused: %s cannot be given any: %s. It is served for text; "
            "docs/clients.md lists the families whose images are read",
            loaded.facts.name,
            reason.rstrip("."),
        )
        return None
    return ImageEncoder(loaded.vision.model, loaded.model, bytes_max, splits)


class _TestPrompt:
    """A picture between two texts, forwarded as prompts here are and as mlx-vlm does it."""

    def __init__(self, loaded: LoadedModel, picture: PromptImage) -> None:
        assert loaded.vision is not None
        self._model, self._language = loaded.vision.model, loaded.model
        self._vision = ImageEncoder(self._model, self._language, bytes_max=0)
        before, self._behind = (
            list(loaded.tokenizer.encode(text, add_special_tokens=False))
            for text in (BEFORE, BEHIND)
        )
        self._picture = picture
        self._ids = [*before, *picture.ids, *self._behind]
        self._run = ImageRun(len(before), len(before) + len(picture.ids), picture)

    def needs_one_forward(self) -> str:
        """Return why mlx-vlm would not cut a prompt with this picture; "" where it would."""
        inputs = {name: self._spread(array) for name, array in self._picture.inputs().items()}
        for model in (self._model, self._language.model):
            policy = getattr(model, "chunked_prefill_policy", None)
            if policy is not None:
                cuts = policy(input_ids=mx.array([self._ids]), prefill_kwargs=inputs)
                return "" if cuts else _ONE_FORWARD
        return ""

    def is_read_alike(self, in_two: bool) -> bool:
        """Whether the logits behind the image are those of mlx-vlm; `in_two` cuts the image."""
        run = self._run
        middle = [(run.start + run.end) // 2] if in_two else []
        cuts = [0, run.start, *middle, run.end, len(self._ids)]
        error = _error(self._in_forwards(self._ids, cuts, [run]), self._whole())
        text_error = max(self._text_error(cuts, at) for at in range(TEXTS))
        log.debug("images: error %.1e, text %.1e, in_two=%s", error, text_error, in_two)
        return error <= ERROR_MAX + TEXT_ERRORS_MAX * text_error

    def _text_error(self, cuts: Sequence[int], at: int) -> float:
        """Return the error of text as long as the prompt, cut alike; another for each `at`."""
        words = self._behind[at:] + self._behind[:at]
        text = (words * len(self._ids))[: len(self._ids)]
        return _error(
            self._in_forwards(text, cuts, []), self._in_forwards(text, [0, len(text)], [])
        )

    def _whole(self) -> NDArray[Any]:
        """Return the last logits of the prompt in one forward, as mlx-vlm makes it."""
        inputs = {name: self._spread(array) for name, array in self._picture.inputs().items()}
        ids, pixels = mx.array([self._ids]), inputs.pop("pixel_values")
        mask = mx.ones(ids.shape, dtype=mx.int32)
        made = self._model.get_input_embeddings(ids, pixels, mask=mask, **inputs).to_dict()
        made = {name: value for name, value in made.items() if value is not None}
        made = inputs | self._language.cast_inputs(made)
        cache = self._language.make_cache()
        return self._last(self._language.model(ids, cache=cache, **made).logits)

    def _in_forwards(
        self, tokens: Sequence[int], cuts: Sequence[int], runs: Sequence[ImageRun]
    ) -> NDArray[Any]:
        """Return the last logits of tokens that are forwarded as prompts here are."""
        cache = self._language.make_cache()
        for start, end in pairwise(cuts):
            ids = tokens[start:end]
            arguments = self._vision.model_arguments(ids, start, runs)
            logits = self._language(mx.array([ids]), cache=cache, **arguments)
        return self._last(logits)

    def _last(self, logits: mx.array) -> NDArray[Any]:
        """Return the logits (n, vocabulary) of the text behind the image."""
        behind = logits[0, -len(self._behind) :].astype(mx.float32)
        return np.array(behind).astype(np.float64)

    def _spread(self, array: NDArray[Any]) -> mx.array:
        """Return an input for the whole prompt: one value for each token is 0 for the text's."""
        if array.shape == (1, len(self._picture.ids)):
            behind = len(self._ids) - self._run.end
            array = np.pad(array, ((0, 0), (self._run.start, behind)))
        return mx.array(array)


def _error(pieces: NDArray[Any], whole: NDArray[Any]) -> float:
    """Return how unlike logits are: 0 where equal. Not a number where any of them is."""
    return 1 - float(np.corrcoef(pieces.ravel(), whole.ravel())[0, 1])
