"""Encodes each image once, and gives forwards its embeddings in place of the image's tokens.

An image is encoded by itself, so that its embeddings are the same in every prompt. Its positions
follow from its place in the prompt. Each forward gets all images of the prompt, with their places.
When a model is loaded, `checked_vision` compares its logits with mlx-vlm's own.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from numpy.typing import NDArray

from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.worker.cache.image_keys import ImageName, ImageRun, PromptImage
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.model_trials import as_floats, logits_error
from hearth.worker.engine.vision.vlm_language_model import AXES, VLMLanguageModel

log = logging.getLogger(__name__)

POSITIONS_KEPT_MAX: Final = 128  # image sizes for which positions are kept

# Mlx-vlm's inputs of a prompt with images: those that can be cut by tokens, and those that are not
# used. This file makes positions itself, and leaves out masks; `checked_vision` finds models that
# need masks.
_SLICED_INPUTS: Final = {
    "inputs_embeds",
    "visual_pos_masks",
    "deepstack_visual_embeds",
    "per_layer_inputs",
}
_UNUSED_INPUTS: Final = {"position_ids", "rope_deltas", "attention_mask", "attention_mask_4d"}

# An error is 1 minus the correlation of logits. A prompt that is cut differently rounds
# differently, in 16 bits by much. So the error of an image may be a multiple of the error of a
# text with the same cuts. In fp32 a text's error is nearly 0, and a position that is off by one
# gives 3e-4 or more. In a model with experts the router may choose other experts where two are
# nearly tied. Not every text has such ties: hence several texts.
ERROR_MAX: Final = 1e-4
TEXT_ERRORS_MAX: Final = 10  # errors of an image, as a multiple of a text's error
TEXTS: Final = 3
_UNLIKE: Final = "it answers otherwise than mlx-vlm where the text before them is forwarded alone"
_ONE_FORWARD: Final = (
    "mlx-vlm reads a prompt with an image in one forward alone, as tokens in it attend to later "
    "ones, so that no part of it could be kept for the next turn"
)
BEFORE, BEHIND = "Here is a picture:", "What does it show? Tell me in a few words."


class UnknownImageInputs(Exception):
    """Raised if mlx-vlm makes an input without one row for each token of the image."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The inputs of a language model in place of some tokens' ids."""

    embeds: mx.array  # (1, tokens, hidden)
    is_visual: NDArray[np.bool_]  # (tokens,) whether `deepstack` has a row for the token
    deepstack: tuple[mx.array, ...]  # (visual tokens, hidden), for each layer that adds one
    per_layer: mx.array | None  # (1, tokens, ...)

    @property
    def arrays(self) -> list[mx.array]:
        return [a for a in (self.embeds, self.per_layer, *self.deepstack) if a is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def part(self, start: int, end: int) -> "ImageRows":
        """Return the rows of the tokens [start, end). Lazy."""
        assert 0 <= start < end <= len(self.is_visual), (start, end, len(self.is_visual))
        first, last = (int(np.count_nonzero(self.is_visual[:n])) for n in (start, end))
        return ImageRows(
            self.embeds[:, start:end],
            self.is_visual[start:end],
            tuple(layer[first:last] for layer in self.deepstack),
            None if self.per_layer is None else self.per_layer[:, start:end],
        )


class ImageEncoder:
    """Encodes images, keeps their rows, and makes the arguments of forwards from them.

    It keeps the most recently used rows, up to `bytes_max`. The rows of the newest image and of
    spared images (those of running prefills) are always kept.
    Invariant: `nbytes` is the sum over the kept rows.
    `splits_images`: whether an image's tokens may be split over several chunks.
    Owner: the inference thread.
    """

    def __init__(
        self, model: Any, language: VLMLanguageModel, bytes_max: int, splits_images: bool = True
    ) -> None:
        self.splits_images = splits_images
        self.encoder_calls = 0
        self.encoder_seconds = 0.0
        self.failures = 0  # images at which the encoder failed
        self.nbytes = 0  # bytes of the kept rows
        self._model = model
        self._language = language
        self._bytes_max = bytes_max
        # Kept for one key: images, encoded, 256 MB
        self._encoded: OrderedDict[ImageName, ImageRows] = OrderedDict()  # last used at the end
        self._relative_positions: MemoryByOwner[Any, NDArray[np.int32]]
        self._relative_positions = MemoryByOwner(POSITIONS_KEPT_MAX)

    def is_encoded(self, image: PromptImage) -> bool:
        return image.name in self._encoded

    def encode(self, image: PromptImage, spared: Container[ImageName] = ()) -> None:
        """Encode an image, unless its rows are kept, and make it the newest.

        Other images are evicted to make room, except those named in `spared`.

        Raises:
            UnknownImageInputs: the image's inputs cannot be cut by tokens.
        """
        name = image.name
        if name in self._encoded:
            self._encoded.move_to_end(name)
            return
        started = time.perf_counter()
        with mx.stream(generation_stream):
            inputs = {name: mx.array(array) for name, array in image.inputs().items()}
            rows = self._rows(image.ids, **inputs)
            mx.eval(rows.arrays)
        mx.clear_cache()
        self.encoder_calls += 1
        self.encoder_seconds += time.perf_counter() - started
        self._encoded[name] = rows
        self.nbytes += rows.nbytes
        for other in [*self._encoded][:-1]:
            if self.nbytes > self._bytes_max and other not in spared:
                self.nbytes -= self._encoded.pop(other).nbytes

    def bytes_beside(self, spared: Container[ImageName]) -> int:
        """Return the bytes of all kept rows, except those of the images named in `spared`."""
        return sum(rows.nbytes for name, rows in self._encoded.items() if name not in spared)

    def release(self, spared: Container[ImageName] = ()) -> None:
        """Drop all rows, except those of the images named in `spared`."""
        for name in [name for name in self._encoded if name not in spared]:
            self.nbytes -= self._encoded.pop(name).nbytes
        assert self.nbytes >= 0 and (self._encoded or self.nbytes == 0), self.nbytes
        mx.clear_cache()

    def shift(self, runs: Sequence[ImageRun], position: int) -> int:
        """Return what to add to `position`, the number of tokens before a text token.

        The sum is the token's position for the model. An image takes fewer positions than tokens,
        so the shift after an image is negative.
        """
        return sum(self._advance(run.image) for run in runs if run.end <= position)

    def model_arguments(
        self, ids: Sequence[int], at: int, runs: Sequence[ImageRun]
    ) -> dict[str, Any]:
        """Return the other arguments of a forward of `ids`, the tokens [at, at + n) of a prompt.

        `runs` are all images of the prompt in order. Images among these tokens are encoded, unless
        their rows are kept.
        """
        end = at + len(ids)
        if not any(run.start < end and at < run.end for run in runs):
            return {"shift": self.shift(runs, at)}
        parts, position = [], at
        for run in runs:
            start, stop = max(run.start, at), min(run.end, end)
            if start >= stop:
                continue
            if position < start:
                parts.append(self._rows(ids[position - at : start - at]))
            self.encode(run.image)
            rows = self._encoded[run.image.name]
            parts.append(rows.part(start - run.start, stop - run.start))
            position = stop
        if position < end:
            parts.append(self._rows(ids[position - at :]))
        arguments = _joined(parts)
        count = arguments["inputs_embeds"].shape[1]
        assert count == len(ids), (count, len(ids))
        if self._language.takes_positions:
            positions = mx.array(self._positions(at, end, runs))[:, None]
            arguments["position_ids"] = self._language.placed(positions)
        return arguments

    def _rows(self, ids: Sequence[int], **inputs: mx.array) -> ImageRows:
        """Return mlx-vlm's inputs for the tokens `ids` of text, or of the image in `inputs`."""
        pixels = inputs.pop("pixel_values", None)
        if pixels is not None:
            inputs["mask"] = mx.ones((1, len(ids)), dtype=mx.int32)
        made = self._model.get_input_embeddings(mx.array([list(ids)]), pixels, **inputs).to_dict()
        made = {name: value for name, value in made.items() if value is not None}
        odd = made.keys() - _SLICED_INPUTS - _UNUSED_INPUTS
        if odd:
            raise UnknownImageInputs(f"its language model is given {', '.join(sorted(odd))}")
        made = self._language.cast_inputs(made)
        # The fields of mlx-vlm's InputEmbeddingsFeatures, with a row for each token.
        count = len(ids)
        visual = np.zeros(count, dtype=np.bool_)
        deepstack = made.get("deepstack_visual_embeds")
        deepstack = getattr(deepstack, "embeddings", deepstack)  # Cohere Compass wraps them
        if deepstack is not None:
            visual = np.array(made["visual_pos_masks"], dtype=np.bool_).reshape(count)
        rows = ImageRows(
            made["inputs_embeds"],
            visual,
            () if deepstack is None else tuple(deepstack),
            made.get("per_layer_inputs"),
        )
        if (
            rows.embeds.shape[:2] != (1, count)
            or any(layer.shape[0] != np.count_nonzero(visual) for layer in rows.deepstack)
            or (rows.per_layer is not None and rows.per_layer.shape[:2] != (1, count))
        ):
            raise UnknownImageInputs(f"rows of shapes {[array.shape for array in rows.arrays]}")
        return rows

    def _positions(self, at: int, end: int, runs: Sequence[ImageRun]) -> NDArray[np.int32]:
        """Return the positions (3, n) of the tokens [at, end)."""
        positions = np.tile(np.arange(at, end, dtype=np.int32), (AXES, 1))
        shift = 0
        for run in runs:
            start, stop = max(run.start, at), min(run.end, end)
            if start < stop:
                inside = self._positions_of(run.image)[:, start - run.start : stop - run.start]
                positions[:, start - at : stop - at] = run.start + shift + inside
            advance = self._advance(run.image)
            positions[:, max(run.end - at, 0) :] += advance
            shift += advance
        return positions

    def _advance(self, image: PromptImage) -> int:
        """Return the image's positions minus its tokens; 0 without mRoPE."""
        if not self._language.takes_positions:
            return 0
        return int(self._positions_of(image).max()) + 1 - len(image.ids)

    def _positions_of(self, image: PromptImage) -> NDArray[np.int32]:
        """Return the positions (3, tokens) of an image at the start of a prompt."""
        size = (image.grid, len(image.ids))
        known = self._relative_positions.get(image.owner, size)
        if known is None:
            with mx.stream(generation_stream):
                grid = mx.array(image.grid) if image.grid else None
                positions, _ = self._language.model.get_rope_index(
                    mx.array([image.ids], dtype=mx.int32), image_grid_thw=grid
                )
                positions = np.array(positions, dtype=np.int32)
            if positions.shape == (1, len(image.ids)):  # the same on each axis
                positions = np.broadcast_to(positions, (AXES, *positions.shape))
            if positions.shape != (AXES, 1, len(image.ids)):
                raise UnknownImageInputs(f"positions of shape {positions.shape}")
            known = positions[:, 0]
            self._relative_positions.put(image.owner, size, known)
        return known


def _joined(parts: Sequence[ImageRows]) -> dict[str, Any]:
    """Return the arguments of the language model for adjacent rows."""
    arguments: dict[str, Any] = {
        "inputs_embeds": mx.concatenate([part.embeds for part in parts], axis=1)
    }
    per_layer = [part.per_layer for part in parts if part.per_layer is not None]
    if per_layer:
        arguments["per_layer_inputs"] = mx.concatenate(per_layer, axis=1)
    visual = np.concatenate([part.is_visual for part in parts])
    if visual.any():
        layers = zip(*(part.deepstack for part in parts if part.deepstack), strict=True)
        arguments["visual_pos_masks"] = mx.array(visual)[None]
        arguments["deepstack_visual_embeds"] = [mx.concatenate(list(layer)) for layer in layers]
    return arguments


def checked_vision(loaded: LoadedModel, image: PromptImage, bytes_max: int) -> ImageEncoder | None:
    """Return the image encoder of this model; None, with a warning, if it would misread images.

    `image` is any small image, as the model's processor made it.
    """
    assert loaded.vision is not None, "a model without a vision tower got an image"
    prompt = _TestPrompt(loaded, image)
    splits = reads = False
    try:
        with mx.stream(generation_stream):
            reason = prompt.needs_one_forward()
            if not reason:
                splits = prompt.is_read_alike(in_two=True)
                reads = splits or prompt.is_read_alike(in_two=False)
                reason = _UNLIKE
    except Exception as error:  # any error of an architecture that was not made for this
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
    """A prompt with an image between two texts, forwarded as in this server and as in mlx-vlm."""

    def __init__(self, loaded: LoadedModel, image: PromptImage) -> None:
        assert loaded.vision is not None
        self._model, self._language = loaded.vision.model, loaded.model
        self._vision = ImageEncoder(self._model, self._language, bytes_max=0)
        before, self._behind = (
            list(loaded.tokenizer.encode(text, add_special_tokens=False))
            for text in (BEFORE, BEHIND)
        )
        self._image = image
        self._ids = [*before, *image.ids, *self._behind]
        self._run = ImageRun(len(before), len(before) + len(image.ids), image)

    def needs_one_forward(self) -> str:
        """Return why mlx-vlm would not cut a prompt with this image; "" if it would."""
        inputs = {name: self._spread(array) for name, array in self._image.inputs().items()}
        for model in (self._model, self._language.model):
            policy = getattr(model, "chunked_prefill_policy", None)
            if policy is not None:
                cuts = policy(input_ids=mx.array([self._ids]), prefill_kwargs=inputs)
                return "" if cuts else _ONE_FORWARD
        return ""

    def is_read_alike(self, in_two: bool) -> bool:
        """Whether the logits after the image are those of mlx-vlm. `in_two` cuts the image."""
        run = self._run
        cuts = [0, run.start, run.end, len(self._ids)]
        if in_two:
            cuts.insert(2, (run.start + run.end) // 2)
        error = logits_error(self._in_forwards(self._ids, cuts, [run]), self._whole())
        text_error = max(self._text_error(cuts, number) for number in range(TEXTS))
        log.debug("images: error %.1e, text %.1e, in_two=%s", error, text_error, in_two)
        return error <= ERROR_MAX + TEXT_ERRORS_MAX * text_error

    def _text_error(self, cuts: Sequence[int], number: int) -> float:
        """Return the error of text `number`, as long as the prompt and with the same cuts."""
        words = self._behind[number:] + self._behind[:number]
        text = (words * len(self._ids))[: len(self._ids)]
        return logits_error(
            self._in_forwards(text, cuts, []), self._in_forwards(text, [0, len(text)], [])
        )

    def _whole(self) -> NDArray[Any]:
        """Return the last logits of the prompt in one forward, made as in mlx-vlm."""
        inputs = {name: self._spread(array) for name, array in self._image.inputs().items()}
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
        """Return the last logits of tokens that are forwarded in chunks, as in this server."""
        cache = self._language.make_cache()
        for start, end in pairwise(cuts):
            ids = tokens[start:end]
            arguments = self._vision.model_arguments(ids, start, runs)
            logits = self._language(mx.array([ids]), cache=cache, **arguments)
        return self._last(logits)

    def _last(self, logits: mx.array) -> NDArray[Any]:
        """Return the logits (n, vocabulary) of the text after the image, as floats."""
        return as_floats(logits[0, -len(self._behind) :])

    def _spread(self, array: NDArray[Any]) -> mx.array:
        """Return an image's input for the whole prompt, with 0 for tokens of text."""
        if array.shape == (1, len(self._image.ids)):
            behind = len(self._ids) - self._run.end
            array = np.pad(array, ((0, 0), (self._run.start, behind)))
        return mx.array(array)
