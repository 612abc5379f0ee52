"""Builds a model from its config alone, to learn by shapes what its caches take.

MLX's arrays take no memory before they are evaluated, and nothing here is: neither the weights nor
the forward that fills the caches. So a model far larger than this machine can be asked.
Owner: the calling thread, as of all arrays.
"""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from hearth.shared.models.local_models import context_tokens
from hearth.shared.settings import Settings
from hearth.shared.wire_messages import ModelFacts
from hearth.worker.engine.compute_dtype import compute_in, computed_in, weight_sizes_of
from hearth.worker.engine.model_loader import (
    LoadedModel,
    backend,
    cache_layout,
    dtype_choice,
    told_dtype,
)
from hearth.worker.engine.vision.vlm_loader import read_json, sees_images
from hearth.worker.engine.weights_identity import WeightsIdentity

# How mlx-lm finds an architecture; it has no public name of its own.
_known_classes: Final = inspect.signature(load_model).parameters["get_model_classes"].default
PROBE_TOKENS: Final = 3
LAYERS_MAX: Final = (
    4096  # a layer is Python objects: a config that told 10**9 would fill all memory
)
_LAYER_COUNTS: Final = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_DTYPES: Final = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def unloaded_model(directory: Path, context_max: int, weight_bytes: int) -> LoadedModel:
    """Return the model of `directory` without its weights; only its config has to be there.

    Where its weights are there, they tell the types of its numbers; else the config does.

    Raises:
        Exception: mlx-lm knows no such architecture, or its config is not whole.
    """
    _check_layer_count(read_json(directory / "config.json"))
    has_weights = next(directory.glob("model*.safetensors"), None) is not None
    classes = _known_classes if has_weights else _classes_without_weights
    model, config = load_model(directory, lazy=True, strict=False, get_model_classes=classes)
    if not has_weights:
        # Numbers have the type that a conversion gives them, which leaves some as they are.
        dtype = _DTYPES.get(told_dtype(config), mx.bfloat16)
        is_cast = getattr(model, "cast_predicate", lambda _name: True)
        cast = [
            (name, array.astype(dtype))
            for name, array in tree_flatten(model.parameters())
            if mx.issubdtype(array.dtype, mx.floating) and is_cast(name)
        ]
        model.update(tree_unflatten(cast))
        _pack(model, config)
    told = read_json(directory / "tokenizer_config.json").get("model_max_length")
    positions = context_tokens(config, told)
    facts = ModelFacts(
        name="",
        path=str(directory),
        architecture=str(config.get("model_type", "unknown")),
        context_tokens=min(positions, context_max),
        vocab_size=0,
        parameter_count=0,
        weight_bytes=weight_bytes,
        cache_layout=cache_layout(make_prompt_cache(model)),
        backend=backend(),
        model_tokens=positions,
        context_by="model" if positions <= context_max else "setting",
    )
    identity = WeightsIdentity(directory, is_hashed=False)
    return LoadedModel(model, None, {}, config, directory, identity, facts)


def as_computed(loaded: LoadedModel, settings: Settings, dense_max: int) -> LoadedModel:
    """Return the unloaded model in what a worker would compute it in; it is changed.

    `dense_max` is what a dense form may take on a CPU. Towers, of which only the files' bytes are
    known, count as what these have beyond the language model, in 16 bits.
    """
    sizes, nbytes = weight_sizes_of(loaded.model), loaded.facts.weight_bytes
    tower = max(0, nbytes - sizes.own_bytes) if sees_images(loaded.directory) else 0
    whole = replace(sizes, dense_bytes=sizes.dense_bytes + 2 * tower)
    dtype = dtype_choice(settings, loaded.model, whole, loaded.config, dense_max)(None)
    if dtype.name == "float32" and dtype.is_cast:
        nbytes += tower
    compute_in(dtype, loaded.model, evaluates=False)
    computed = computed_in(dtype, whole, loaded.config)
    nbytes += sizes.growth(dtype)
    facts = replace(loaded.facts, weight_bytes=nbytes, computed_in=computed)
    return replace(loaded, facts=facts, dtype=dtype)


def unloaded_probe(model: nn.Module) -> list[Any]:
    """Return caches as they are once they have seen some tokens; not evaluated."""
    cache: list[Any] = make_prompt_cache(model)
    model(mx.zeros((1, PROBE_TOKENS), mx.int32), cache=cache)
    return cache


def parameter_bytes(model: nn.Module) -> int:
    """Return what the parameters of a model take, or would take."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def _check_layer_count(config: dict[str, Any]) -> None:
    """Raises: ValueError: it tells more layers than any model has."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        for name in _LAYER_COUNTS:
            count = part.get(name)
            if isinstance(count, int) and count > LAYERS_MAX:
                raise ValueError(f"its config tells {count:,} layers, and {LAYERS_MAX:,} are built")


def _classes_without_weights(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Return the classes of an architecture, whose model does not look for weights to rename."""
    model_class, arguments_class = _known_classes(config)
    whole = {"sanitize": lambda _self, weights: weights}
    return type(model_class.__name__, (model_class,), whole), arguments_class


def _pack(model: nn.Module, config: dict[str, Any]) -> None:
    """Quantise the layers that the config says a conversion has quantised; nothing is evaluated."""
    told = config.get("quantization")
    if not isinstance(told, dict):
        return
    group_size = told["group_size"]

    def how(path: str, module: nn.Module) -> Any:
        fits = hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0
        return told.get(path, fits) if fits else False

    nn.quantize(
        model, group_size, told["bits"], mode=told.get("mode", "affine"), class_predicate=how
    )
