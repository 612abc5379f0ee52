"""Runs a socketless worker for vision models on prompts that contain images, or their keys."""

import random
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from hearth.worker.cache.block_hash import Tokens, pack, prefix_hashes
from hearth.worker.cache.image_keys import (
    ImageRun,
    PromptImage,
    identity_of,
    image_borders,
    keys_of,
)
from hearth.worker.cache.prefix_search import PrefixQuery
from hearth.worker.engine.model_loader import LoadedModel
from scripts.harness.image_files import painted
from scripts.harness.socketless_worker import Answer, Machine, loaded, marks, vocabulary

SIZES = ((64, 64), (64, 64), (150, 90), (224, 224))  # width, height: the first two are alike


def picture_of(loaded: LoadedModel, image: Image.Image) -> PromptImage:
    """Return what the model's processor makes of an image, its marker alone for a prompt."""
    from mlx_vlm import prepare_inputs

    assert loaded.vision is not None
    processor = loaded.vision.processor
    marker = str(getattr(processor, "boi_token", "<|vision_start|><|image_pad|><|vision_end|>"))
    made = dict(prepare_inputs(processor, images=[image], prompts=marker))
    ids = tuple(np.array(made.pop("input_ids")).ravel().tolist())
    inputs = {name: np.array(made[name]) for name in made if name != "attention_mask"}
    grid = tuple(tuple(row) for row in inputs.get("image_grid_thw", np.zeros((0, 3))).tolist())
    return PromptImage(identity_of(inputs), ids, grid, lambda: inputs)


def prompt(*parts: list[int] | PromptImage) -> tuple[list[int], list[ImageRun]]:
    """Return a prompt's ids and where its pictures stand in it."""
    ids, runs = list[int](), list[ImageRun]()
    for part in parts:
        if isinstance(part, PromptImage):
            runs.append(ImageRun(len(ids), len(ids) + len(part.ids), part))
        ids += part.ids if isinstance(part, PromptImage) else part
    return ids, runs


@cache
def picture(name: str, number: int) -> PromptImage:
    return picture_of(loaded(name), painted(number, SIZES[number % len(SIZES)]))


@cache
def shown(name: str, number: int) -> tuple[int, ...]:
    """Return the keys of an image, as they stand in a prompt."""
    one = picture(name, number)
    return tuple(keys_of(one.ids, [ImageRun(0, len(one.ids), one)]).tolist())


class LookingMachine(Machine):
    """A machine that is given keys, of texts and of `shown` images."""

    def __init__(self, name: str, model: LoadedModel | None = None, **more: Any) -> None:
        """`model` stands in the place of the fixture's."""
        super().__init__(model or loaded(name), marks(name), vocabulary(name), **more)
        self._album = {shown(name, n)[0]: picture(name, n) for n in range(2 * len(SIZES))}

    def submit(self, ids: list[int], tokens_max: int = 8, *_: Any, **how: Any) -> Answer:
        runs = self._runs(pack(ids))
        plain = list(ids)
        for run in runs:
            plain[run.start : run.end] = run.image.ids
        assert len(plain) == len(ids) and min(plain) >= 0
        return super().submit(plain, tokens_max, runs, **how)

    def foresee(self, ids: list[int]) -> None:
        """Have a prompt read in idle time, as one that will be asked."""
        keys, cuts = pack(ids), self.rule.natural(pack(ids))
        images = tuple(run.bare() for run in self._runs(keys))
        query = PrefixQuery(keys, cuts, prefix_hashes(self._root, keys, cuts), images=images)
        self.scheduler.prefill_later(query)

    def _runs(self, keys: Tokens) -> list[ImageRun]:
        pictures = [(start, self._album[int(keys[start])]) for start in image_borders(keys)[0]]
        return [ImageRun(start, start + len(one.ids), one) for start, one in pictures]

    @property
    def encoder_calls(self) -> int:
        vision = self.engine.vision
        assert vision is not None
        return int(vision.encoder_calls)


def swapped(name: str, ids: list[int], chance: random.Random) -> tuple[list[int], int]:
    """Return the prompt with one of its images changed for another of its size, and where."""
    start, number = chance.choice(
        [
            (start, number)
            for start in image_borders(pack(ids))[0]
            for number in range(2 * len(SIZES))
            if shown(name, number)[0] == ids[start]
        ]
    )
    other = shown(name, (number + len(SIZES)) % (2 * len(SIZES)))
    return [*ids[:start], *other, *ids[start + len(other) :]], start
