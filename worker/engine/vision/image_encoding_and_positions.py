"""Encodes each image once, and gives forwards its rows in place of the image's tokens.

A picture is encoded alone, so that it is the same in every prompt, and its positions follow from
where it stands. Each forward is given the images of its prompt and where they stand. When a model
is loaded it is checked that it reads images so as mlx-vlm has it read them.
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

POSITIONS_KEPT_MAX: Final = 128  # sizes of pictures whose positions are kept

# What mlx-vlm says of a prompt with images, and we can cut. Positions we make ourselves; that
# masks are left out is what the check at the start is for.
_SLICED_INPUTS: Final = {
    "inputs_embeds",
    "visual_pos_masks",
    "deepstack_visual_embeds",
    "per_layer_inputs",
}
_UNUSED_INPUTS: Final = {"position_ids", "rope_deltas", "attention_mask", "attention_mask_4d"}

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


class UnknownImageInputs(Exception):
    """Mlx-vlm gives the language model something of images that is not a row for each token."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """What a language model is given in place of some tokens."""

    embeds: mx.array  # (1, tokens, hidden)
    is_visual: NDArray[np.bool_]  # (tokens,) whether `deepstack` has a row of it
    deepstack: tuple[mx.array, ...]  # (visual tokens, hidden) each, one for each layer that adds it
    per_layer: mx.array | None  # (1, tokens, ...)

    @property
    def arrays(self) -> list[mx.array]:
        return [a for a in (self.embeds, self.per_layer, *self.deepstack) if a is not None]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def part(self, start: int, end: int) -> "ImageRows":
        """Return those of the tokens [start, end). Lazy."""
        assert 0 <= start < end <= len(self.is_visual), (start, end, len(self.is_visual))
        first, last = (int(np.count_nonzero(self.is_visual[:n])) for n in (start, end))
        return ImageRows(
            self.embeds[:, start:end],
            self.is_visual[start:end],
            tuple(layer[first:last] for layer in self.deepstack),
            None if self.per_layer is None else self.per_layer[:, start:end],
        )


class ImageEncoder:
    """Encodes pictures, keeps their rows, and makes a forward's arguments of them.

    Keeps the rows used last, up to `bytes_max`, and always those of the newest picture and of
    prompts that are being prefilled.
    Invariant: `nbytes` is the sum over the rows kept.
    `splits_images`: whether an image's tokens may be forwarded in several chunks.
    Owner: the inference thread.
    """

    def __init__(
        self, model: Any, language: VLMLanguageModel, bytes_max: int, splits_images: bool = True
    ) -> None:
        self.splits_images = splits_images
        self.encoder_calls = 0
        self.encoder_seconds = 0.0
        self.failures = 0  # images at which the encoder failed
        self.nbytes = 0  # of the rows that are kept
        self._model = model
        self._language = language
        self._bytes_max = bytes_max
        # Kept for one key: images, encoded, 256 MB
        self._encoded: OrderedDict[ImageName, ImageRows] = OrderedDict()  # used last at the end
        self._relative_positions: MemoryByOwner[Any, NDArray[np.int32]]
        self._relative_positions = MemoryByOwner(POSITIONS_KEPT_MAX)

    def is_encoded(self, picture: PromptImage) -> bool:
        return picture.name in self._encoded

    def encode(self, picture: PromptImage, spared: Container[ImageName] = ()) -> None:
        """Have the picture's rows at hand: evaluated, and now the newest.

        Those of the names `spared` do not make way for them.

        Raises:
            UnknownImageInputs: they cannot be cut by tokens.
        """
        name = picture.name
        if name in self._encoded:
            self._encoded.move_to_end(name)
            return
        started = time.perf_counter()
        with mx.stream(generation_stream):
            inputs = {name: mx.array(array) for name, array in picture.inputs().items()}
            rows = self._rows(picture.ids, **inputs)
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
        """Return the bytes of all rows but those of the names `spared`."""
        return sum(rows.nbytes for name, rows in self._encoded.items() if name not in spared)

    def release(self, spared: Container[ImageName] = ()) -> None:
        """Give up all rows but those of the names `spared`."""
        for name in [name for name in self._encoded if name not in spared]:
            self.nbytes -= self._encoded.pop(name).nbytes
        assert self.nbytes >= 0 and (self._encoded or self.nbytes == 0), self.nbytes
        mx.clear_cache()

    def shift(self, runs: Sequence[ImageRun], position: int) -> int:
        """Return what a text token's position is beyond `position`, the number of those before.

        An image of many tokens takes few positions, so it is negative behind one.
        """
        return sum(self._advance(run.image) for run in runs if run.end <= position)

    def model_arguments(
        self, ids: Sequence[int], at: int, runs: Sequence[ImageRun]
    ) -> dict[str, Any]:
        """Return what the language model is called with, beside the tokens `ids` [at, at + n).

        `runs` are all images of the prompt, ascending. Pictures that the stretch covers, wholly
        or in part, are encoded where they are not at hand.
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
            arguments["position_ids"] = mx.array(self._positions(at, end, runs))[:, None]
        return arguments

    def _rows(self, ids: Sequence[int], **inputs: mx.array) -> ImageRows:
        """Return what mlx-vlm makes of `ids`, with the image that `inputs` are of, or as text."""
        pixels = inputs.pop("pixel_values", None)
        if pixels is not None:
            inputs["mask"] = mx.ones((1, len(ids)), dtype=mx.int32)
        made = self._model.get_input_embeddings(mx.array([list(ids)]), pixels, **inputs).to_dict()
        made = {name: value for name, value in made.items() if value is not None}
        odd = made.keys() - _SLICED_INPUTS - _UNUSED_INPUTS
        if odd:
            raise UnknownImageInputs(f"its language model is given {', '.join(sorted(odd))}")
        made = self._language.cast_inputs(made)
        # The fields of mlx-vlm's InputEmbeddingsFeatures, as rows of tokens.
        count = len(ids)
        visual = np.zeros(count, dtype=np.bool_)
        deepstack = made.get("deepstack_visual_embeds")
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

    def _advance(self, picture: PromptImage) -> int:
        """Return the positions that a picture takes beyond its number of tokens; 0 without mRoPE"""
        if not self._language.takes_positions:
            return 0
        return int(self._positions_of(picture).max()) + 1 - len(picture.ids)

    def _positions_of(self, picture: PromptImage) -> NDArray[np.int32]:
        """Return the positions (3, tokens) of a picture that stands at the prompt's start."""
        key = (picture.grid, len(picture.ids))
        known = self._relative_positions.get(picture.owner, key)
        if known is None:
            with mx.stream(generation_stream):
                grid = mx.array(picture.grid) if picture.grid else None
                positions, _ = self._language.model.get_rope_index(
                    mx.array([picture.ids], dtype=mx.int32), image_grid_thw=grid
                )
                positions = np.array(positions, dtype=np.int32)
            if positions.shape != (AXES, 1, len(picture.ids)):
                raise UnknownImageInputs(f"positions of shape {positions.shape}")
            known = positions[:, 0]
            self._relative_positions.put(picture.owner, key, known)
        return known


def _joined(parts: Sequence[ImageRows]) -> dict[str, Any]:
    """Return the rows of one stretch, as the language model names them."""
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
        cuts = [0, run.start, run.end, len(self._ids)]
        if in_two:
            cuts.insert(2, (run.start + run.end) // 2)
        error = logits_error(self._in_forwards(self._ids, cuts, [run]), self._whole())
        text_error = max(self._text_error(cuts, at) for at in range(TEXTS))
        log.debug("images: error %.1e, text %.1e, in_two=%s", error, text_error, in_two)
        return error <= ERROR_MAX + TEXT_ERRORS_MAX * text_error

    def _text_error(self, cuts: Sequence[int], at: int) -> float:
        """Return the error of text as long as the prompt, cut alike; another for each `at`."""
        words = self._behind[at:] + self._behind[:at]
        text = (words * len(self._ids))[: len(self._ids)]
        return logits_error(
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
        return as_floats(logits[0, -len(self._behind) :])

    def _spread(self, array: NDArray[Any]) -> mx.array:
        """Return an input for the whole prompt: one value for each token is 0 for the text's."""
        if array.shape == (1, len(self._picture.ids)):
            behind = len(self._ids) - self._run.end
            array = np.pad(array, ((0, 0), (self._run.start, behind)))
        return mx.array(array)
