"""Builds an adapter's layers beside the model's own, by mlx-lm's LoRA layers.

Owner: the inference thread.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from hearth.worker.engine.lora.lora_adapter import AdaptedLayer, LoraAdapter
from hearth.worker.engine.lora.lora_files import AdapterMisfit, LoraConfig, listed

# What a name may begin with that says nothing: libraries wrap a model differently.
_WRAPPERS: Final = ("base_model", "model", "language_model")
_FLOAT32_BYTES: Final = 4
# Arrays as large as a layer's weights that a DoRA layer makes in each forward: the weights
# unpacked, the product of its two matrices, and their sum.
_DORA_ARRAYS: Final = 3
# Arrays as large as a layer's output that a LoRA layer makes of float32: its product, and scaled.
_LORA_OUTPUTS: Final = 2

_WEIGHTS: Final = frozenset(("weight", "scales", "biases"))

LayerArrays = Mapping[str, Mapping[str, mx.array]]  # by the layer's name: its parts


def make_adapter(
    name: str,
    network: nn.Module,
    config: LoraConfig,
    arrays: LayerArrays,
    *,
    sees_images: bool = False,
) -> LoraAdapter:
    """Return an adapter of `network`, which is left as it was. Its arrays are evaluated.

    It has no identity yet.

    Raises:
        AdapterMisfit: it was made for another model.
    """
    places = _places(network, config, arrays, sees_images)
    layers = _adapted_layers(network, config, {at: arrays[each] for at, each in places.items()})
    parts = tuple(array for each in arrays.values() for array in each.values())
    mx.eval(parts)
    if not all(mx.all(mx.isfinite(array)).item() for array in parts):
        raise AdapterMisfit("its weights hold what are no numbers (NaN or infinity)")
    sizes = [_sizes(each) for each in arrays.values()]
    widest = max(taken * given for taken, given in sizes) if config.is_dora else 0
    return LoraAdapter(
        name,
        "",
        layers,
        parts,
        forward_bytes=_FLOAT32_BYTES * _DORA_ARRAYS * widest,
        token_bytes=_FLOAT32_BYTES * _LORA_OUTPUTS * max(given for _, given in sizes),
    )


class _Watched:
    """Stands in an adapted layer's place, and notes how the model uses it."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.is_called = self.is_read = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.is_called = True
        return self._layer(*args, **named)

    def __getattr__(self, name: str) -> Any:
        if name in _WEIGHTS:
            self.is_read = True
        return getattr(self._layer, name)


def why_not_computed(adapter: LoraAdapter, model: Any) -> str:
    """Return why the model does not compute with an adapter; "" where it does. Tries it.

    Upstream may read a layer's weights past the layer, so it is watched in a forward of a prompt,
    in one of a token behind that, and in one of a batch. Some layers take no part in short ones.
    """
    watched = [_Watched(layer.adapted) for layer in adapter.layers]
    tried = [replace(at, adapted=to) for at, to in zip(adapter.layers, watched, strict=True)]
    cache = make_prompt_cache(model)
    forwards = (([[1, 2, 3]], cache), ([[4]], cache), ([[1], [2]], make_prompt_cache(model)))
    with mx.stream(generation_stream), replace(adapter, layers=tuple(tried)).applied():
        for ids, kept in forwards:
            logits = model(mx.array(ids), cache=kept)
            if not mx.all(mx.isfinite(logits)).item():
                return "its logits are no numbers"
    if any(layer.is_read for layer in watched) or not any(layer.is_called for layer in watched):
        return "the model reads the weights of its layers past them"
    return ""


def _sizes(parts: Mapping[str, mx.array]) -> tuple[int, int]:
    """Return how many numbers a layer takes and gives for a token."""
    is_of_experts = parts["lora_a"].ndim == 3  # (experts, rank, in), (experts, out, rank)
    taken = parts["lora_a"].shape[-1 if is_of_experts else 0]
    return taken, parts["lora_b"].shape[-2 if is_of_experts else -1]


def _places(
    network: nn.Module, config: LoraConfig, arrays: LayerArrays, sees_images: bool
) -> dict[str, str]:
    """Return by its path in the network the adapter's name of each layer.

    Raises:
        AdapterMisfit: the network has no such layer, or the adapter lacks one that it says it has.
    """
    paths = {_bare(path): path for path, _ in network.named_modules() if path}
    found = {paths[_bare(name)]: name for name in arrays if _bare(name) in paths}
    unknown = [name for name in arrays if _bare(name) not in paths]
    if unknown:
        raise AdapterMisfit(f"the model has no {listed(unknown)}")
    if sees_images:  # whose embeddings are made beside the network, of images too
        outside = [name for name in arrays if not _bare(name).startswith("layers.")]
        if outside:
            raise AdapterMisfit(f"of a model that sees images, only blocks: {listed(outside)}")
    if len(found) < len(arrays):
        raise AdapterMisfit("two of its layers have one place in the model")
    missing = set(_wanted(network, config, paths)) - found.keys()
    if missing:
        raise AdapterMisfit(f"its weights lack layers that it was trained on: {listed([*missing])}")
    return found


def _bare(name: str) -> str:
    """Return a layer's name without what libraries wrap a model in."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts)


def _wanted(network: nn.Module, config: LoraConfig, paths: Mapping[str, str]) -> Iterable[str]:
    """Yield the paths of the layers that an adapter was trained on, as far as it says that."""
    if config.keys is None:
        return
    blocks = list(network.layers)
    first = max(0, len(blocks) - config.blocks) if config.blocks else 0
    modules = dict(network.named_modules())
    for bare, path in paths.items():
        if not isinstance(modules[path], nn.Linear | nn.QuantizedLinear):
            continue
        head, _, rest = bare.partition(".")
        number, _, key = rest.partition(".")
        is_in_block = head == "layers" and number.isdigit()
        if is_in_block and int(number) >= first and _is_key(key, config):
            yield path


def _is_key(key: str, config: LoraConfig) -> bool:
    assert config.keys is not None
    if not config.is_peft:
        return key in config.keys
    return any(key == wanted or key.endswith(f".{wanted}") for wanted in config.keys)


def _adapted_layers(
    network: nn.Module, config: LoraConfig, arrays: LayerArrays
) -> tuple[AdaptedLayer, ...]:
    """Return the layers with these arrays, by their paths; `network` is left as it was."""
    modules = dict(network.named_modules())
    places = {path: _holder(network, path) for path in arrays}
    packed = [path for path in arrays if isinstance(modules[path], nn.QuantizedEmbedding)]
    if config.is_dora and packed:
        raise AdapterMisfit(f"{listed(packed)} is packed, and mlx-lm's DoRA takes no packed one")
    by_rank: dict[int, set[str]] = {}
    for path, parts in arrays.items():
        by_rank.setdefault(parts["lora_a"].shape[1], set()).add(path)
    try:
        for rank, paths in by_rank.items():
            options = {"rank": rank, "scale": config.scale, "dropout": 0.0, "keys": paths}
            linear_to_lora_layers(network, 0, options, use_dora=config.is_dora)
        adapted = {path: holder[key] for path, (holder, key) in places.items()}
    except ValueError as error:  # a layer that upstream has no LoRA for
        raise AdapterMisfit(str(error)) from error
    finally:
        for path, (holder, key) in places.items():
            holder[key] = modules[path]
    for path, layer in adapted.items():
        assert layer is not modules[path], path
        _fill(path, layer, arrays[path])
    return tuple(AdaptedLayer(*places[path], modules[path], adapted[path]) for path in arrays)


def _fill(path: str, adapted: nn.Module, parts: Mapping[str, mx.array]) -> None:
    odd = [
        f"{path}.{name} is {array.shape}, and the model takes {adapted[name].shape}"
        for name, array in parts.items()
        if array.shape != adapted[name].shape
    ]
    if odd:
        raise AdapterMisfit(f"{odd[0]}{f' (and {len(odd) - 1} more)' if odd[1:] else ''}")
    adapted.update(dict(parts))
    adapted.eval()


def _holder(network: nn.Module, path: str) -> tuple[Any, str | int]:
    """Return what holds the module at a path, and by which key."""
    node: Any = network
    *before, last = path.split(".")
    for part in before:
        node = node[int(part) if isinstance(node, list) else part]
    return node, int(last) if isinstance(node, list) else last
