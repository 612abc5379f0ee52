"""Finds and loads checkpoints of vision models, and loads those that mlx-lm does not know.

Mlx-vlm is imported only for these.
Owner: the inference thread.
"""

import contextlib
import functools
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hearth.shared.machine import has_vision
from hearth.worker.engine.vision.vlm_language_model import VLMLanguageModel

_VISION_KEY: Final = re.compile(r"vis(ion|ual)|img_processor")  # keys in config.json
_TOWER_WEIGHT: Final = re.compile(r"(^|\.)(vis(ion|ual)\w*|img_\w+|vpm|vit)\.")  # weights' names
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
_HEADER_BYTES_MAX: Final = 100_000_000  # safetensors' own limit


@dataclass(frozen=True, slots=True)
class VisionModel:
    """A vision model's checkpoint, as mlx-vlm loaded it."""

    model: Any  # the vision tower, and `language_model`
    language: VLMLanguageModel
    processor: Any  # turns images and text into inputs of `model`


def has_tower(directory: Path) -> bool:
    """Whether a checkpoint has a vision tower: its configuration, a processor and its weights.

    Text-only conversions may keep the configuration of a tower whose weights they dropped.
    """
    config = read_json(directory / "config.json")
    is_configured = any(value and _VISION_KEY.match(name) for name, value in config.items())
    return (
        is_configured
        and any((directory / name).is_file() for name in _PROCESSORS)
        and any(_TOWER_WEIGHT.search(name) for name in _weight_names(directory))
    )


def sees_images(directory: Path) -> bool:
    """Whether a checkpoint has a vision tower, and mlx-vlm is installed and knows its kind."""
    if not (has_vision() and has_tower(directory)):
        return False
    return known_package(read_json(directory / "config.json")) is not None


def known_package(config: Mapping[str, Any]) -> str | None:
    """Return the package of mlx-vlm for a configuration's type; None if it knows no such type.

    It is that of a model or of a draft model, and is not imported here.
    """
    from mlx_vlm import models
    from mlx_vlm.speculative import drafters
    from mlx_vlm.utils import get_model_type

    name = get_model_type(config)
    for parent in (models, drafters):
        found = pkgutil.iter_modules(parent.__path__, f"{parent.__name__}.")
        if (package := f"{parent.__name__}.{name}") in [each.name for each in found if each.ispkg]:
            return package
    return None


@contextlib.contextmanager
def only_known_code(runs_code: bool) -> Iterator[None]:
    """Make mlx-vlm refuse a configuration with a `model_file`, unless `runs_code`.

    Mlx-vlm runs such a file without asking. `remote_code` looks for it first, but the configuration
    may have changed since, or have been read under another name.
    """
    from mlx_vlm import utils

    find = utils.get_model_and_args

    def checked(config: dict[str, Any], model_path: Path | None = None) -> Any:
        if config.get("model_file") and not runs_code:
            raise ValueError("its configuration names a model_file, which is code of its own")
        return find(config, model_path)

    utils.get_model_and_args = checked
    try:
        yield
    finally:
        utils.get_model_and_args = find


def load_vision_model(directory: Path, runs_code: bool) -> VisionModel:
    """Load a vision model's checkpoint. The weights are not read yet.

    `runs_code`: whether the checkpoint's own code may run.
    """
    from mlx_vlm import load

    with only_known_code(runs_code):  # many processors of mlx-vlm trust code by default
        model, processor = load(str(directory), lazy=True, trust_remote_code=runs_code)
    return VisionModel(model, _language_model(model), processor)


def load_language_model(directory: Path, runs_code: bool) -> VLMLanguageModel:
    """Load the language model of a checkpoint without a tower. The weights are not read yet.

    `runs_code`: whether the checkpoint's own code may run.
    """
    from mlx_vlm.utils import load_model

    with only_known_code(runs_code):
        return _language_model(load_model(directory, lazy=True))


def _language_model(model: Any) -> VLMLanguageModel:
    """Return the language model of mlx-vlm's `model`."""
    from mlx_vlm.models.cache import make_prompt_cache

    missing = [n for n in ("language_model", "get_input_embeddings") if not hasattr(model, n)]
    if missing:
        raise ValueError(f"mlx-vlm's {type(model).__module__} has no {' and no '.join(missing)}.")
    text = model.language_model
    return VLMLanguageModel(text, functools.partial(make_prompt_cache, text))


def chat_template(directory: Path) -> str | None:
    """Return the template of chat_template.json, a file that only processors read.

    It is None if the tokenizer has a template of its own.
    """
    tokenizer = read_json(directory / "tokenizer_config.json")
    if tokenizer.get("chat_template") or (directory / "chat_template.jinja").is_file():
        return None
    template = read_json(directory / "chat_template.json").get("chat_template")
    return template if isinstance(template, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty for a missing or broken file, as in mlx-lm."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _weight_names(directory: Path) -> Iterator[str]:
    index = read_json(directory / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        yield from index
        return
    for path in sorted(directory.glob("*.safetensors")):
        yield from safetensors_header(path)[1]


def weight_sizes(directory: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the name, the bytes and safetensors' dtype of each weight of a checkpoint."""
    for path in sorted(directory.glob("*.safetensors")):
        for name, entry in safetensors_header(path)[1].items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield name, end - begin, entry["dtype"]


def safetensors_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where the data of a safetensors file begin, and its header: JSON behind its length."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        octets = file.read(length) if length <= _HEADER_BYTES_MAX else b""
    try:
        content = json.loads(octets)
    except ValueError:
        content = {}
    return 8 + length, content if isinstance(content, dict) else {}
