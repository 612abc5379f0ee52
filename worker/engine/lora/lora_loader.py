"""Loads the adapters of ADAPTERS, and counts their weights with the model's.

Two formats are read: mlx-lm's (adapters.safetensors) and PEFT's (adapter_model.safetensors). The
layers are mlx-lm's LoRA and DoRA layers.
Owner: the inference thread.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import snapshot_download

from hearth.shared.errors import StartError
from hearth.shared.settings import Settings
from hearth.worker.engine.lora.lora_adapter import AdaptedLayer, LoraAdapter, LoraAdapters, applied
from hearth.worker.engine.mlx_memory import GB
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.prefill_lengths import network_of
from hearth.worker.engine.vision.vlm_loader import read_json
from hearth.worker.engine.weights_identity import WeightsIdentity

log = logging.getLogger(__name__)

CONFIG: Final = "adapter_config.json"
MLX_LM_WEIGHTS: Final = "adapters.safetensors"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
FILES: Final = (CONFIG, MLX_LM_WEIGHTS, PEFT_WEIGHTS)  # only these are fetched, read and hashed

# PEFT's initialisations that leave the model's own weights as they are.
_PLAIN_STARTS: Final = ("gaussian", "eva", "orthogonal")
# PEFT's options that mlx-lm's LoRA layers do not have.
_REFUSED: Final[Mapping[str, str]] = {
    "modules_to_save": "it trains whole modules",
    "fan_in_fan_out": "its weights are transposed",
    "rank_pattern": "its layers differ in rank",
    "alpha_pattern": "its layers differ in scale",
    "lora_bias": "it trains biases",
    "trainable_token_indices": "it trains single tokens",
    "target_parameters": "it trains parameters that are no layers",
    "alora_invocation_tokens": "it begins amid a prompt",
    "layer_replication": "it repeats layers of the model",
    "use_qalora": "its layers take the means of groups",
    "use_bdlora": "its weights are blocks",
    "arrow_config": "it chooses among other adapters",
}
_FUSE: Final = (
    "merge it into the model (PEFT: merge_and_unload) and serve the result as a model of its own "
    "(MODELS)"
)
_PEFT_NAME: Final = re.compile(
    r"(?P<layer>.+)\.lora_(?P<part>A|B|magnitude_vector)(\.default)?(\.weight)?"
)
_MLX_LM_NAME: Final = re.compile(r"((?P<layer>.*)\.)?(?P<part>lora_a|lora_b|m)", re.DOTALL)
_PEFT_PARTS: Final = {"A": "lora_a", "B": "lora_b", "magnitude_vector": "m"}
# First parts of layer names that differ between libraries, as each wraps models in its own way.
_WRAPPERS: Final = ("base_model", "model", "language_model")
_FLOAT32_BYTES: Final = 4
# How many arrays of the size of a layer's weights a DoRA layer makes in each forward: the unpacked
# weights, the product of its two matrices, and their sum.
_DORA_ARRAYS: Final = 3
# How many float32 arrays of the size of a layer's output a LoRA layer makes: its product, and the
# scaled product.
_LORA_OUTPUTS: Final = 2

_WEIGHTS: Final = frozenset(("weight", "scales", "biases"))

LayerArrays = Mapping[str, Mapping[str, mx.array]]  # layer name -> part name -> array

Identify = Callable[..., WeightsIdentity]  # (directory, patterns of its files)


@dataclass(frozen=True, slots=True)
class _Found:
    """An adapter's files, found before the model is loaded. The files may change until read."""

    name: str
    source: str
    directory: Path
    weights: Path


class LoraLoader:
    """Finds the adapters before the model is loaded, and loads them afterwards.

    Owner: the inference thread.
    """

    def __init__(self, settings: Settings, admit: Callable[[int], None]) -> None:
        """`admit` is called with the bytes of all weights before they are read.

        Raises:
            StartError: an entry of ADAPTERS is not an adapter, or is of an unsupported kind.
        """
        self._admit = admit
        self._found: list[_Found] = []
        for name, source in settings.adapters:
            try:
                directory = find_directory(source)
                weights = weights_file(directory, read_config(directory))
            except Exception as error:  # any error of a hub or a file
                raise _refusal(name, source, error) from error
            self._found.append(_Found(name, source, directory, weights))

    def admit(self, nbytes: int) -> None:
        """Admit a model's weights of `nbytes` together with the adapters' weights.

        Raises:
            StartError: the weights do not fit into memory together.
        """
        own = sum(found.weights.stat().st_size for found in self._found)
        try:
            self._admit(nbytes + own)
        except StartError as error:
            if not own:
                raise
            raise StartError(f"{error} {own / GB:.1f} GB of them are those of ADAPTERS.") from error

    def load(self, loaded: LoadedModel, identify: Identify) -> LoadedModel:
        """Return the model with its adapters; unchanged if ADAPTERS is empty.

        `identify` hashes the files of a directory.

        Raises:
            StartError: an adapter does not fit the model.
        """
        adapters = {found.name: self._load(found, loaded, identify) for found in self._found}
        return replace(loaded, adapters=LoraAdapters(adapters)) if adapters else loaded

    def _load(self, found: _Found, loaded: LoadedModel, identify: Identify) -> LoraAdapter:
        try:
            identity = identify(found.directory, FILES)  # before the files are read
            config = read_config(found.directory)
            arrays = read_arrays(weights_file(found.directory, config), config)
            network, sees_images = network_of(loaded), loaded.vision is not None
            adapter = make_adapter(found.name, network, config, arrays, sees_images=sees_images)
            adapter = replace(adapter, identity="\n".join(identity.parts()))
            if reason := why_not_computed(adapter, loaded.model):
                raise ValueError(reason)
        except Exception as error:  # any error of a file, an architecture or the device
            raise _refusal(found.name, found.source, error, loaded.facts.path) from error
        log.info(
            "adapter=%s layers=%d mb=%.1f", found.name, len(adapter.layers), adapter.nbytes / 2**20
        )
        return adapter


def _refusal(name: str, source: str, error: Exception, model: str = "") -> StartError:
    reason = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
    beside = f" with {model!r}" if model else ""
    return StartError(
        f"ADAPTERS has {name}={source}, which cannot be used{beside}: {reason}. Name a LoRA or "
        "DoRA adapter that was made for the model, by its directory or hub id, or take it out."
    )


class AdapterMisfit(ValueError):
    """Raised for an adapter that cannot be used, with this model or at all. The text says why."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The parsed content of an adapter_config.json. Immutable."""

    is_peft: bool
    is_dora: bool
    scale: float
    keys: tuple[str, ...] | None = None  # the layers that it was trained on; None = not given
    blocks: int = 0  # mlx-lm: number of the last blocks, which were trained; 0 = all
    rank: int = 0  # PEFT: divisor of the scale; 0 = the rank of the weights


def find_directory(source: str) -> Path:
    """Return the directory of an adapter, fetched if `source` is a hub id.

    Raises:
        AdapterMisfit: `source` is neither a directory nor a hub id, or files are missing.
    """
    directory = Path(source).expanduser()
    if not directory.is_dir():
        if source.startswith(("/", ".", "~")) or source.count("/") != 1:
            raise AdapterMisfit("it is neither a directory nor a hub id (owner/name)")
        directory = Path(snapshot_download(source, allow_patterns=list(FILES)))
    if not (directory / CONFIG).is_file():
        raise AdapterMisfit(f"there is no {CONFIG}")
    return directory


def read_config(directory: Path) -> LoraConfig:
    """Return an adapter's configuration. Raises AdapterMisfit if its kind is not supported."""
    config = read_json(directory / CONFIG)
    return _peft_config(config) if "peft_type" in config else _mlx_lm_config(config)


def weights_file(directory: Path, config: LoraConfig) -> Path:
    """Return the file of an adapter's weights. Raises AdapterMisfit if it is missing."""
    path = directory / (PEFT_WEIGHTS if config.is_peft else MLX_LM_WEIGHTS)
    if path.is_file():
        return path
    if (directory / "adapter_model.bin").exists():
        raise AdapterMisfit(
            "its weights are adapter_model.bin, a pickle, which could run code; save them as "
            "safetensors (PEFT: save_pretrained(..., safe_serialization=True))"
        )
    raise AdapterMisfit(f"there is no {path.name}")


def read_arrays(path: Path, config: LoraConfig) -> dict[str, dict[str, mx.array]]:
    """Return each layer's arrays by name: lora_a (in, rank), lora_b (rank, out), and DoRA's m.

    Raises:
        AdapterMisfit: the file holds other arrays too, or lacks parts of a layer.
    """
    found: dict[str, dict[str, mx.array]] = {}
    odd = []
    weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    for name, array in weights.items():
        match = _PEFT_NAME.fullmatch(name) if config.is_peft else _MLX_LM_NAME.fullmatch(name)
        if match is None:
            odd.append(name)
            continue
        part = _PEFT_PARTS.get(match["part"], match["part"])
        is_turned = config.is_peft and part != "m"
        found.setdefault(match["layer"] or "", {})[part] = array.T if is_turned else array
    if odd:
        raise AdapterMisfit(f"it holds weights of no LoRA layer: {listed(odd)}")
    wanted = {"lora_a", "lora_b", *(["m"] if config.is_dora else [])}
    lacking = [name for name, parts in found.items() if parts.keys() != wanted]
    if lacking or not found:
        parts = ", ".join(sorted(wanted))
        raise AdapterMisfit(f"these layers have not just {parts}: {listed(lacking) or 'all'}")
    rank = config.rank
    other = [name for name, parts in found.items() if rank not in (0, parts["lora_a"].shape[-1])]
    if other:
        raise AdapterMisfit(f"its {CONFIG} says r={rank}, of which these are not: {listed(other)}")
    return found


def listed(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


def _mlx_lm_config(config: Mapping[str, Any]) -> LoraConfig:
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise AdapterMisfit(
            "its fine_tune_type is full: it replaces whole weights, as large as the model's; fuse "
            "it (mlx_lm.fuse) and serve the result as a model of its own (MODELS)"
        )
    parameters = config.get("lora_parameters")
    if kind not in ("lora", "dora") or not isinstance(parameters, dict):
        raise AdapterMisfit(
            f"its {CONFIG} is neither mlx-lm's (fine_tune_type lora or dora, lora_parameters) nor "
            "PEFT's (peft_type LORA)"
        )
    scale, keys, blocks = (
        parameters.get("scale"),
        parameters.get("keys"),
        config.get("num_layers", 0),
    )
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        raise AdapterMisfit(f"its lora_parameters have no scale, which mlx-lm's {CONFIG} has")
    names = tuple(map(str, keys)) if isinstance(keys, list) else None
    is_given = isinstance(blocks, int) and blocks > 0
    return LoraConfig(False, kind == "dora", float(scale), names, blocks if is_given else 0)


def _peft_config(config: Mapping[str, Any]) -> LoraConfig:
    if config["peft_type"] != "LORA":
        raise AdapterMisfit(f"its peft_type is {config['peft_type']!r:.40}; only LORA is taken")
    for name, reason in _REFUSED.items():
        if config.get(name):
            raise AdapterMisfit(f"its {CONFIG} sets {name}: {reason}; {_FUSE}")
    if config.get("bias") not in (None, "none"):
        raise AdapterMisfit(f"its {CONFIG} sets bias: it trains biases; {_FUSE}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise AdapterMisfit(f"it began with {start!r:.40}, which changes the model too; {_FUSE}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise AdapterMisfit(f"its {CONFIG} has no r and lora_alpha")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    keys = config.get("target_modules")
    names = tuple(map(str, keys)) if isinstance(keys, list) else None
    is_some = bool(config.get("layers_to_transform") or config.get("exclude_modules"))
    return LoraConfig(
        True, bool(config.get("use_dora")), scale, None if is_some else names, rank=rank
    )


def make_adapter(
    name: str,
    network: nn.Module,
    config: LoraConfig,
    arrays: LayerArrays,
    *,
    sees_images: bool = False,
) -> LoraAdapter:
    """Return an adapter of `network`, without an identity. Its arrays are evaluated.

    `network` is not changed.

    Raises:
        AdapterMisfit: the adapter was made for another model.
    """
    names = _names_by_path(network, config, arrays, sees_images)
    layers = _adapted_layers(network, config, {path: arrays[name] for path, name in names.items()})
    parts = tuple(array for layer in arrays.values() for array in layer.values())
    mx.eval(parts)
    if not all(mx.all(mx.isfinite(array)).item() for array in parts):
        raise AdapterMisfit("its weights hold what are no numbers (NaN or infinity)")
    sizes = [_sizes(layer) for layer in arrays.values()]
    widest = max(inputs * outputs for inputs, outputs in sizes) if config.is_dora else 0
    return LoraAdapter(
        name,
        "",
        layers,
        parts,
        forward_bytes=_FLOAT32_BYTES * _DORA_ARRAYS * widest,
        token_bytes=_FLOAT32_BYTES * _LORA_OUTPUTS * max(outputs for _, outputs in sizes),
    )


class _Watched:
    """Wraps an adapted layer, and records whether the model calls it or reads its weights."""

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
    """Return why the model does not compute with an adapter; "" if it does. Runs a trial.

    Upstream's code may read a layer's weights without calling the layer. So the layers are watched
    in three forwards: of a prompt, of the next token, and of a batch. Not every layer has to be
    called: some take no part in short forwards.
    """
    watched = [_Watched(layer.adapted) for layer in adapter.layers]
    tried = [
        replace(layer, adapted=watcher)
        for layer, watcher in zip(adapter.layers, watched, strict=True)
    ]
    cache = make_prompt_cache(model)
    forwards = (([[1, 2, 3]], cache), ([[4]], cache), ([[1], [2]], make_prompt_cache(model)))
    with mx.stream(generation_stream), applied(replace(adapter, layers=tuple(tried))):
        for ids, forward_cache in forwards:
            logits = model(mx.array(ids), cache=forward_cache)
            if not mx.all(mx.isfinite(logits)).item():
                return "its logits are no numbers"
    if any(layer.is_read for layer in watched) or not any(layer.is_called for layer in watched):
        return "the model reads the weights of its layers past them"
    return ""


def _sizes(parts: Mapping[str, mx.array]) -> tuple[int, int]:
    """Return the numbers of a layer's inputs and outputs for a token."""
    is_of_experts = parts["lora_a"].ndim == 3  # (experts, rank, in), (experts, out, rank)
    inputs = parts["lora_a"].shape[-1 if is_of_experts else 0]
    return inputs, parts["lora_b"].shape[-2 if is_of_experts else -1]


def _names_by_path(
    network: nn.Module, config: LoraConfig, arrays: LayerArrays, sees_images: bool
) -> dict[str, str]:
    """Return the adapter's name of each layer by the layer's path in the network.

    Raises:
        AdapterMisfit: the network lacks a layer, or the adapter lacks a layer of its configuration.
    """
    paths = {_bare(path): path for path, _ in network.named_modules() if path}
    found = {paths[_bare(name)]: name for name in arrays if _bare(name) in paths}
    unknown = [name for name in arrays if _bare(name) not in paths]
    if unknown:
        raise AdapterMisfit(f"the model has no {listed(unknown)}")
    if sees_images:  # then embeddings are made outside the network, for images too
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
    """Return a layer's name without the names of a library's wrappers."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts)


def _wanted(network: nn.Module, config: LoraConfig, paths: Mapping[str, str]) -> Iterable[str]:
    """Yield the paths of the layers that an adapter was trained on, if it names them."""
    if config.keys is None:
        return
    first = max(0, len(network.layers) - config.blocks) if config.blocks else 0
    modules = dict(network.named_modules())
    for bare, path in paths.items():
        if not isinstance(modules[path], nn.Linear | nn.QuantizedLinear):
            continue
        head, _, rest = bare.partition(".")
        number, _, key = rest.partition(".")
        is_in_block = head == "layers" and number.isdigit()
        is_key = key in config.keys
        if config.is_peft:
            is_key = any(key == wanted or key.endswith(f".{wanted}") for wanted in config.keys)
        if is_in_block and int(number) >= first and is_key:
            yield path


def _adapted_layers(
    network: nn.Module, config: LoraConfig, arrays: LayerArrays
) -> tuple[AdaptedLayer, ...]:
    """Return the adapted layers, made of `arrays` by path. `network` is not changed."""
    modules = dict(network.named_modules())
    holders = {path: _holder(network, path) for path in arrays}
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
        adapted = {path: holder[key] for path, (holder, key) in holders.items()}
    except ValueError as error:  # upstream has no LoRA layer for some layer
        raise AdapterMisfit(str(error)) from error
    finally:
        for path, (holder, key) in holders.items():
            holder[key] = modules[path]
    for path, layer in adapted.items():
        assert layer is not modules[path], path
        odd = [
            f"{path}.{name} is {array.shape}, and the model takes {layer[name].shape}"
            for name, array in arrays[path].items()
            if array.shape != layer[name].shape
        ]
        if odd:
            raise AdapterMisfit(f"{odd[0]}{f' (and {len(odd) - 1} more)' if odd[1:] else ''}")
        layer.update(dict(arrays[path]))
        layer.eval()
    return tuple(AdaptedLayer(*holders[path], modules[path], adapted[path]) for path in arrays)


def _holder(network: nn.Module, path: str) -> tuple[Any, str | int]:
    """Return the module or list that holds the module at a path, and its key there."""
    node: Any = network
    *before, last = path.split(".")
    for part in before:
        node = node[int(part) if isinstance(node, list) else part]
    return node, int(last) if isinstance(node, list) else last
