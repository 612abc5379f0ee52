"""Makes pictures for vision models and prompts with them, by the models' own processors."""

from typing import Any

import numpy as np
from PIL import Image

from hearth.worker.cache.image_keys import ImageRun, PromptImage, identity_of
from hearth.worker.engine.model_loader import LoadedModel

NOT_SEEN = ("input_ids", "attention_mask")  # by the encoder


def noise(seed: int, width: int = 90, height: int = 120) -> Image.Image:
    """Return an image unlike those of other seeds."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def picture_of(loaded: LoadedModel, image: Image.Image) -> PromptImage:
    """Return what the model's processor makes of an image, its marker alone for a prompt."""
    from mlx_vlm import prepare_inputs

    assert loaded.vision is not None
    processor = loaded.vision.processor
    made = prepare_inputs(processor, images=[image], prompts=marker(processor))
    inputs = {name: np.array(made[name]) for name in made if name not in NOT_SEEN}
    grid = tuple(tuple(row) for row in inputs.get("image_grid_thw", np.zeros((0, 3))).tolist())
    ids = tuple(np.array(made["input_ids"]).ravel().tolist())
    return PromptImage(identity_of(inputs), ids, grid, lambda: inputs)


def marker(processor: Any) -> str:
    """Return what stands for an image in a prompt's text."""
    if hasattr(processor, "boi_token"):
        return str(processor.boi_token)
    return "<|vision_start|><|image_pad|><|vision_end|>"


def prompt(*parts: list[int] | PromptImage) -> tuple[list[int], list[ImageRun]]:
    """Return a prompt's ids and where its pictures stand in it."""
    ids: list[int] = []
    runs = []
    for part in parts:
        start = len(ids)
        ids += part.ids if isinstance(part, PromptImage) else part
        if isinstance(part, PromptImage):
            runs.append(ImageRun(start, len(ids), part))
    return ids, runs
