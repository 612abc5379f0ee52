"""Finds the adapters of ADAPTERS, and reads their configuration and weights.

Two formats are read: mlx-lm's (adapters.safetensors) and PEFT's (adapter_model.safetensors).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.utils import snapshot_download

from hearth.worker.engine.vision.vlm_loader import read_json

CONFIG: Final = "adapter_config.json"
MLX_LM_WEIGHTS: Final = "adapters.safetensors"
PEFT_WEIGHTS: Final = "adapter_model.safetensors"
FILES: Final = (CONFIG, MLX_LM_WEIGHTS, PEFT_WEIGHTS)  # all that is fetched, read and hashed

# PEFT's ways to begin that leave the model's own weights as they are.
_PLAIN_STARTS: Final = ("gaussian", "eva", "orthogonal")
# PEFT's options that a LoRA layer of mlx-lm has no place for.
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
_PEFT_NAME: Final = re.compile(
    r"(?P<layer>.+)\.lora_(?P<part>A|B|magnitude_vector)(\.default)?(\.weight)?"
)
_PEFT_PARTS: Final = {"A": "lora_a", "B": "lora_b", "magnitude_vector": "m"}


class AdapterMisfit(ValueError):
    """An adapter cannot be used with this model, or here at all; the text says why."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What an adapter_config.json says. Immutable."""

    is_peft: bool
    is_dora: bool
    scale: float
    keys: tuple[str, ...] | None = None  # the layers that it was trained on; None = it does not say
    blocks: int = 0  # of mlx-lm, the last ones that have them; 0 = all
    rank: int = 0  # of PEFT, whose scale was made of it; 0 = whatever the weights have


def find_directory(source: str) -> Path:
    """Return the directory of an adapter, fetched where `source` is a hub id.

    Raises:
        AdapterMisfit: it is neither, or its files are not there.
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
    """Return what an adapter is. Raises: AdapterMisfit: of a kind that is not taken."""
    config = read_json(directory / CONFIG)
    return _peft_config(config) if "peft_type" in config else _mlx_lm_config(config)


def weights_file(directory: Path, config: LoraConfig) -> Path:
    """Return the file of an adapter's weights. Raises: AdapterMisfit: it is not there."""
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
    """Return by the name of each layer its lora_a (in, rank), lora_b (rank, out), and DoRA's m.

    Raises:
        AdapterMisfit: the file holds something else, too, or not all of a layer's parts.
    """
    found: dict[str, dict[str, mx.array]] = {}
    odd = []
    weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
    for name, array in weights.items():
        layer, part = _peft_place(name) if config.is_peft else _mlx_lm_place(name)
        if part:
            is_turned = config.is_peft and part != "m"
            found.setdefault(layer, {})[part] = array.T if is_turned else array
        else:
            odd.append(name)
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
    is_told = isinstance(blocks, int) and blocks > 0
    return LoraConfig(False, kind == "dora", float(scale), names, blocks if is_told else 0)


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


_FUSE: Final = (
    "merge it into the model (PEFT: merge_and_unload) and serve the result as a model of its own "
    "(MODELS)"
)


def _mlx_lm_place(name: str) -> tuple[str, str]:
    layer, _, part = name.rpartition(".")
    return layer, part if part in ("lora_a", "lora_b", "m") else ""


def _peft_place(name: str) -> tuple[str, str]:
    match = _PEFT_NAME.fullmatch(name)
    return (match["layer"], _PEFT_PARTS[match["part"]]) if match else (name, "")
