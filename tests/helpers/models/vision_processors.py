"""Loads the processors of the vision fixtures as a worker does."""

import json
from functools import cache
from typing import Any

from mlx_vlm.utils import get_model_and_args, load_processor

from hearth.worker.prompt.images.image_processor import PIXELS_MAX, ImageReader, image_marker
from scripts.fixtures.fixture_cache import fixture_dir


@cache
def processor_of(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a fixture's processor and its config."""
    directory = fixture_dir(name)
    config = json.loads((directory / "config.json").read_text())
    get_model_and_args(dict(config))  # the model's module brings its own processor
    return load_processor(str(directory), add_detokenizer=False), config


def reader_of(name: str, pixels_max: int = PIXELS_MAX) -> ImageReader:
    processor, config = processor_of(name)
    marker = image_marker(processor.tokenizer, processor)
    assert marker is not None
    return ImageReader(processor, config, marker, pixels_max)
