"""Encodes each image once, and gives forwards its rows in place of the image's tokens.

A picture is encoded alone, so that it is the same in every prompt, and its positions follow from
where it stands. Each forward is given the images of its prompt and where they stand.
"""

import time
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from numpy.typing import NDArray

from hearth.shared.memory_by_owner import MemoryByOwner
from hearth.worker.cache.image_keys import ImageName, ImageRun, PromptImage
from hearth.worker.engine.vision.vlm_language_model import AXES, VLMLanguageModel

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
        return sum(self._advance(run.picture) for run in runs if run.end <= position)

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
        parts = []
        for start, stop, run in _segments(at, end, runs):
            if run is None:
                parts.append(self._rows(ids[start - at : stop - at]))
            else:
                self.encode(run.picture)
                rows = self._encoded[run.picture.name]
                parts.append(rows.part(start - run.start, stop - run.start))
        arguments = _model_arguments(parts)
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
        return _rows_of(self._language.cast_inputs(made), len(ids))

    def _positions(self, at: int, end: int, runs: Sequence[ImageRun]) -> NDArray[np.int32]:
        """Return the positions (3, n) of the tokens [at, end)."""
        positions = np.tile(np.arange(at, end, dtype=np.int32), (AXES, 1))
        shift = 0
        for run in runs:
            start, stop = max(run.start, at), min(run.end, end)
            if start < stop:
                inside = self._positions_of(run.picture)[:, start - run.start : stop - run.start]
                positions[:, start - at : stop - at] = run.start + shift + inside
            advance = self._advance(run.picture)
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


def _segments(
    at: int, end: int, runs: Sequence[ImageRun]
) -> Iterator[tuple[int, int, ImageRun | None]]:
    """Yield the parts of [at, end) that are one image's, or text (None), ascending."""
    position = at
    for run in runs:
        start, stop = max(run.start, at), min(run.end, end)
        if start >= stop:
            continue
        if position < start:
            yield position, start, None
        yield start, stop, run
        position = stop
    if position < end:
        yield position, end, None


def _rows_of(made: Mapping[str, Any], count: int) -> ImageRows:
    """Return the fields of mlx-vlm's InputEmbeddingsFeatures as rows of `count` tokens."""
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
    visual_count = int(np.count_nonzero(visual))
    if (
        rows.embeds.shape[:2] != (1, count)
        or any(layer.shape[0] != visual_count for layer in rows.deepstack)
        or (rows.per_layer is not None and rows.per_layer.shape[:2] != (1, count))
    ):
        raise UnknownImageInputs(f"rows of shapes {[array.shape for array in rows.arrays]}")
    return rows


def _model_arguments(parts: Sequence[ImageRows]) -> dict[str, Any]:
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
