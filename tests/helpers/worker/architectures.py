"""Loads tiny models of the architectures in tests/data/architectures, once a process."""

from functools import cache

from hearth.shared.settings import load_settings
from hearth.worker.engine.model_loader import LoadedModel, load_model
from scripts.harness.architectures import architecture_dir


@cache
def architecture(name: str) -> LoadedModel:
    """Return the tiny model "library/name", loaded from files that stay.

    Engrams read the tokenizer there once a model is asked.
    """
    settings = {"MODEL_PATH": str(architecture_dir(name)), "DTYPE": "bfloat16"}
    return load_model(load_settings(settings, None))
