"""Loads the adapters of ADAPTERS beside the model, and counts their weights with those."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hearth.shared.errors import StartError
from hearth.shared.settings import Settings
from hearth.worker.engine.lora.lora_adapter import LoraAdapter, LoraAdapters
from hearth.worker.engine.lora.lora_files import (
    FILES,
    find_directory,
    read_arrays,
    read_config,
    weights_file,
)
from hearth.worker.engine.lora.lora_layers import make_adapter, why_not_computed
from hearth.worker.engine.mlx_memory import GB
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.prefill_lengths import network_of
from hearth.worker.engine.weights_identity import WeightsIdentity

log = logging.getLogger(__name__)

Identify = Callable[..., WeightsIdentity]  # takes a directory and the patterns of its files


@dataclass(frozen=True, slots=True)
class _Found:
    """An adapter's files, as they are before the model is loaded: they may change until then."""

    name: str
    source: str
    directory: Path
    weights: Path


class LoraLoader:
    """Finds the adapters before the model is loaded, and loads them behind that.

    Owner: the inference thread.
    """

    def __init__(self, settings: Settings, admit: Callable[[int], None]) -> None:
        """`admit` is called with the bytes of all weights before they are read.

        Raises:
            StartError: ADAPTERS names something that is no adapter, or of a kind that is not taken.
        """
        self._admit = admit
        self._found = [_find(name, source) for name, source in settings.adapters]

    def admit(self, nbytes: int) -> None:
        """Make ready for a model's weights of `nbytes`, and for those of the adapters.

        Raises:
            StartError: they do not fit together.
        """
        own = sum(found.weights.stat().st_size for found in self._found)
        try:
            self._admit(nbytes + own)
        except StartError as error:
            if not own:
                raise
            raise StartError(f"{error} {own / GB:.1f} GB of them are those of ADAPTERS.") from error

    def load(self, loaded: LoadedModel, identify: Identify) -> LoadedModel:
        """Return the model with its adapters, as it is where ADAPTERS is empty.

        `identify` tells the files of a directory from others.

        Raises:
            StartError: an adapter does not fit the model.
        """
        made = {found.name: self._load(found, loaded, identify) for found in self._found}
        return replace(loaded, adapters=LoraAdapters(made)) if made else loaded

    def _load(self, found: _Found, loaded: LoadedModel, identify: Identify) -> LoraAdapter:
        try:
            identity = identify(found.directory, FILES)  # before they are read
            config = read_config(found.directory)
            arrays = read_arrays(weights_file(found.directory, config), config)
            network, sees_images = network_of(loaded), loaded.vision is not None
            adapter = make_adapter(found.name, network, config, arrays, sees_images=sees_images)
            adapter = replace(adapter, identity="\n".join(identity.parts()))
            if reason := why_not_computed(adapter, loaded.model):
                raise ValueError(reason)
        except Exception as error:  # whatever a file, an architecture or the device can raise
            raise _refusal(found.name, found.source, error, loaded.facts.path) from error
        log.info(
            "adapter=%s layers=%d mb=%.1f", found.name, len(adapter.layers), adapter.nbytes / 2**20
        )
        return adapter


def _find(name: str, source: str) -> _Found:
    try:
        directory = find_directory(source)
        return _Found(name, source, directory, weights_file(directory, read_config(directory)))
    except Exception as error:  # whatever a hub or a file can raise
        raise _refusal(name, source, error) from error


def _refusal(name: str, source: str, error: Exception, model: str = "") -> StartError:
    reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
    beside = f" with {model!r}" if model else ""
    return StartError(
        f"ADAPTERS has {name}={source}, which cannot be used{beside}: {reason}. Name a LoRA or "
        "DoRA adapter that was made for the model, by its directory or hub id, or take it out."
    )
