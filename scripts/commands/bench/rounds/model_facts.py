"""Finds the models that are measured, and tells what a reader must know of them. Loads nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hearth.commands.bench.results import ModelFacts
from hearth.shared.errors import StartError
from hearth.shared.models.local_models import local_models, matching_whole, weight_files
from hearth.shared.models.model_path import builtin_model, named_model
from hearth.worker.engine.vision.vlm_loader import sees_images


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model that is measured, and where it lies. Only `facts` are shared."""

    facts: ModelFacts
    directory: Path


def chosen_models(names: Sequence[str]) -> list[BenchModel]:
    """Return the models that `names` mean, as `hearth serve --model` would read them.

    Raises:
        StartError: one is nothing, is not on this disk, or is called like another.
    """
    models = [_found(name) for name in dict.fromkeys(names)]
    labels = [model.facts.label for model in models]
    if twice := sorted({label for label in labels if labels.count(label) > 1}):
        raise StartError(f"Two models are called {', '.join(twice)}. Rename a directory.")
    return models


def _found(name: str) -> BenchModel:
    named = named_model(name, "--model")
    if isinstance(named, Path):
        builtin, directory = builtin_model(name), named.resolve()
        return _of_directory(directory, builtin.name if builtin else directory.name)
    found = matching_whole(named, local_models())
    if not found:
        raise StartError(f"{name} is not on this disk. Fetch it first: hearth pull {name}")
    return _of_directory(found[0].directory, found[0].name.rpartition("/")[2])


def _of_directory(directory: Path, label: str) -> BenchModel:
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
        bits = (config.get("quantization") or {}).get("bits", 0)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StartError(f"The config.json of {label} cannot be read: {error}") from None
    kind = "vision" if sees_images(directory) else "text"
    nbytes = sum(size for _, size in weight_files(directory))
    architecture = str(config.get("model_type", "unknown"))
    return BenchModel(ModelFacts(label, kind, architecture, nbytes, bits), directory)
