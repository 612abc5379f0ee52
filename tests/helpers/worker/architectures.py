"""Loads tiny models of the architectures in tests/data/architectures, once a process."""

import tempfile
from functools import cache
from pathlib import Path

from hearth.shared.settings import load_settings
from hearth.worker.engine.model_loader import LoadedModel, load_model
from scripts.harness.architectures import make_checkpoint


@cache
def architecture(name: str) -> LoadedModel:
    """Return the tiny model "library/name", loaded from files as any checkpoint is."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_checkpoint(name, directory)
        settings = {"MODEL_PATH": str(directory), "DTYPE": "bfloat16"}
        return load_model(load_settings(settings, None))
