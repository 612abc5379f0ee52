"""Says which library loads a checkpoint's language model, mlx-lm or mlx-vlm, or why neither does.

Mlx-lm comes first wherever it takes the configuration. Mlx-vlm is an extra, and imported only for
the types that mlx-lm lacks. Hearth decodes one token after another and keeps the KV of what stands
before them, so a model that works otherwise is refused. Facts of upstream's classes tell it, so
that no list of names has to be kept. Only a configuration is read, no weights.
Owner: any thread.
"""

import copy
import dataclasses
import importlib.util
import inspect
import pkgutil
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

import mlx_lm.models
from mlx_lm.utils import MODEL_REMAPPING

from hearth.shared.machine import VISION_REMEDY, has_vision
from hearth.worker.engine.vision.vlm_loader import known_package, read_json

Library = Literal["mlx-lm", "mlx-vlm"]

# A model is built as Python objects: a config with 10**9 layers would fill all memory.
LAYERS_MAX: Final = 4096
_LAYER_COUNTS: Final = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_NEAREST_MAX: Final = 8  # names that are tried for the nearest type
_ENCODES: Final = "set EMBEDDING_MODEL or RERANK_MODEL to it, or MODEL_PATH to a chat model"
_CHATS: Final = "set MODEL_PATH to a chat model"
# What a model is that writes no text token by token -> what it does, and what to use instead.
_REFUSED: Final = {
    "a draft model": ("it guesses for another model", "name it in DRAFT_MODEL"),
    "a diffusion model": (
        "it fills a block of tokens in any order and revises them",
        "use one of these, or mlx-vlm's own server",
    ),
    "an encoder-decoder": (
        "its encoder reads a prompt as a whole, so none of it can be kept",
        "use a vision model that docs/clients.md lists",
    ),
    "a prefix model": (
        "each token of a prompt attends to all later ones, so none of it can be kept",
        _CHATS,
    ),
    "a decision model": ("it rates answers that are given to it", "use python -m mlx_vlm.decide"),
    "a generator": ("it makes pictures or video", "use python -m mlx_vlm.generate"),
    "a vision encoder": ("it finds or measures what pictures show", _CHATS),
    "an encoder": ("it turns texts into vectors, scores or labels", _ENCODES),
    "a voice model": ("it is given sound, not tokens of text", _CHATS),
}
_DIFFUSES: Final = ("canvas_length", "mask_token_id")  # fields by which mlx-vlm tells diffusion
_PREFIX: Final = "prefix_lm"
# Ends of the class names in a configuration's `architectures`, which the makers choose.
_HEADS: Final = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM")


def library_of(directory: Path) -> Library:
    """Return the library that loads the language model of a checkpoint. Only its config must exist.

    Raises:
        ValueError: neither loads it, or it is no language model; the text says why, in one line.
    """
    config = read_json(directory / "config.json")
    if not config or config.get("model_file"):
        return "mlx-lm"  # runs the file if ALLOW_MODEL_CODE has it, and says what is wrong
    name = config.get("model_type") or config.get("speculators_model_type")
    if not isinstance(name, str):
        raise ValueError("its config.json names no model_type")
    _check_layer_count(config)
    try:
        library = _library_for(name, config)
    except ValueError:
        raise
    except Exception as error:  # a broken configuration, or a package that cannot be imported
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"its type {name!r} cannot be looked up: {reason}") from error
    if library is None:
        raise ValueError(_unknown(name))
    return library


def _check_layer_count(config: Mapping[str, Any]) -> None:
    """Refuse a config with more layers than any model has. Raises: ValueError."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in _LAYER_COUNTS:
            count = part.get(name)
            if isinstance(count, int) and count > LAYERS_MAX:
                raise ValueError(f"its config tells {count:,} layers, and {LAYERS_MAX:,} are built")


def _library_for(name: str, config: Mapping[str, Any]) -> Library | None:
    """Return the library for a configuration of type `name`; None if none knows the type.

    Raises:
        ValueError: it is no language model.
    """
    if any(str(each).endswith(_HEADS) for each in config.get("architectures") or ()):
        raise ValueError(_refusal("an encoder", name))
    module = _mlx_lm_module(name)
    if module is not None and (not has_vision() or _takes(module, config)):
        return "mlx-lm"
    package = known_package(config) if has_vision() else None
    if package is None:
        return None if module is None else "mlx-lm"  # its own error says what it lacks
    if kind := _unlike_text(importlib.import_module(package), config):
        raise ValueError(_refusal(kind, name))
    return "mlx-vlm"


def _mlx_lm_module(name: str) -> Any:
    """Return mlx-lm's module for a model type; None if it has none that can be imported."""
    name = MODEL_REMAPPING.get(name, name)
    if not any(module.name == name for module in pkgutil.iter_modules(mlx_lm.models.__path__)):
        return None
    try:
        module = importlib.import_module(f"{mlx_lm.models.__name__}.{name}")
    except (ImportError, SystemExit):  # a module that lacks its own packages, as olmo's, exits
        return None
    return module if hasattr(module, "Model") else None


def _takes(module: Any, config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm's architecture takes a configuration: some refuse parts that they lack."""
    try:
        module.ModelArgs.from_dict(copy.deepcopy(config))
    except (ValueError, NotImplementedError):
        return False
    except Exception:  # a broken configuration, of which the load says what is wrong
        return True
    return True


def _unlike_text(package: Any, config: Mapping[str, Any]) -> str:
    """Return which kind of _REFUSED the model of an mlx-vlm package is; "" for a language model."""
    if ".drafters." in package.__name__:
        return "a draft model"
    model = getattr(package, "Model", None)
    if model is None:  # only generators and detectors have no class of this name
        makes = importlib.util.find_spec(f"{package.__name__}.model") is not None
        return "a generator" if makes else "a vision encoder"
    if hasattr(model, "decision_types"):
        return "a decision model"
    inputs = [*inspect.signature(model.__call__).parameters][1:]
    if "cache" not in inputs:
        return "an encoder" if inputs[0] == "input_ids" else "a vision encoder"
    if "decoder_input_ids" in inputs:
        return "an encoder-decoder"
    if not hasattr(model, "get_input_embeddings"):
        return "a voice model"
    fields = {field.name: field.default for field in dataclasses.fields(package.ModelConfig)}
    if not fields.keys().isdisjoint(_DIFFUSES):
        return "a diffusion model"
    return "a prefix model" if config.get(_PREFIX, fields.get(_PREFIX)) is True else ""


def _refusal(kind: str, name: str) -> str:
    does, instead = _REFUSED[kind]
    return (
        f"its type {name!r} is that of {kind}: {does}. Hearth serves models that write text token "
        f"by token; {instead}"
    )


def _unknown(name: str) -> str:
    """Return the text for a type that neither library knows, with the nearest that one knows."""
    lm = f"its type {name!r} is not known to mlx-lm {version('mlx-lm')}"
    if not has_vision():
        return f"{lm}, and mlx-vlm, which knows more types, is missing: {VISION_REMEDY}"
    near = next(filter(_is_served, get_close_matches(name, _names(), _NEAREST_MAX)), None)
    nearest = f"; the nearest known type is {near!r}" if near else ""
    return (
        f"{lm} or mlx-vlm {version('mlx-vlm')}{nearest}. Update Hearth and with it these "
        "libraries, or use a model of a known type"
    )


def _names() -> list[str]:
    """Return the names of all types that a library may know."""
    from mlx_vlm import models, utils

    paths = [*mlx_lm.models.__path__, *models.__path__]
    found = {module.name for module in pkgutil.iter_modules(paths)}
    return sorted(found.union(MODEL_REMAPPING, utils.MODEL_REMAPPING))


def _is_served(name: str) -> bool:
    try:
        return _library_for(name, {"model_type": name}) is not None
    except ValueError:
        return False
