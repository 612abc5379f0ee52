"""Writes adapters of random weights for a loaded model, in mlx-lm's format or in PEFT's."""

import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.utils import load_adapters

from hearth.shared.settings import load_settings
from hearth.worker.engine.lora.lora_loader import CONFIG, MLX_LM_WEIGHTS, PEFT_WEIGHTS, LoraLoader
from hearth.worker.engine.model_loader import LoadedModel
from hearth.worker.engine.prefill_lengths import network_of
from hearth.worker.engine.weights_identity import WeightsIdentity
from scripts.harness.socketless_worker import Machine, loaded, marks, vocabulary

RANK = 4
SCALE = 8.0  # so large that no answer stays as it was
STRENGTH = 0.15  # of the random weights


def key_of(path: str) -> str:
    """Return a layer's name within its block."""
    return path.split("layers.", 1)[1].split(".", 1)[1]


def random_parts(layer: nn.Module) -> dict[str, mx.array]:
    """Return lora_a (in, RANK) and lora_b (RANK, out) of random numbers."""
    given, taken = layer.weight.shape
    if isinstance(layer, nn.QuantizedLinear):
        taken = taken * 32 // layer.bits
    wide = STRENGTH / taken**0.5
    return {
        "lora_a": mx.random.uniform(-wide, wide, (taken, RANK)),
        "lora_b": mx.random.uniform(-STRENGTH, STRENGTH, (RANK, given)),
    }


def write_adapter(
    directory: Path,
    model: LoadedModel,
    seed: int,
    *,
    kind: str = "lora",
    keys: Sequence[str] | None = None,
    scale: float = SCALE,
    **config: Any,
) -> Path:
    """Write an adapter as mlx-lm does, of the layers called `keys` in each block, by default all.

    `config` are further entries of its configuration.
    """
    mx.random.seed(seed)
    used = {
        path: each
        for path, each in network_of(model).named_modules()
        if "layers." in path and isinstance(each, nn.Linear | nn.QuantizedLinear)
        if keys is None or key_of(path) in keys
    }
    weights: dict[str, mx.array] = {}
    for path, layer in used.items():
        parts = random_parts(layer)
        if kind == "dora":
            lengths = DoRALinear.from_base(layer).m
            parts["m"] = lengths * mx.random.uniform(0.8, 1.2, lengths.shape)
        weights |= {f"{path}.{name}": array for name, array in parts.items()}
    told = {
        "fine_tune_type": kind,
        "num_layers": -1,
        "lora_parameters": {
            "rank": RANK,
            "scale": scale,
            "dropout": 0.3,
            "keys": sorted({*map(key_of, used)}),
        },
    }
    return _save(directory, MLX_LM_WEIGHTS, weights, told | config)


def as_peft(source: Path, directory: Path, **config: Any) -> Path:
    """Write what `write_adapter` wrote to `source` as PEFT writes it."""
    weights: dict[str, mx.array] = mx.load(str(source / MLX_LM_WEIGHTS))  # type: ignore[assignment]
    names = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
    turned = {
        f"base_model.model.{path}.{names[part]}": mx.contiguous(weights[f"{path}.{part}"].T)
        for path, _, part in (name.rpartition(".") for name in weights)
    }
    keys = json.loads((source / CONFIG).read_text())["lora_parameters"]["keys"]
    told = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK * SCALE,
        "target_modules": sorted({key.rpartition(".")[2] for key in keys}),
        "use_dora": any(name.endswith(".m") for name in weights),
        "bias": "none",
        "init_lora_weights": True,
    }
    return _save(directory, PEFT_WEIGHTS, turned, told | config)


def _save(
    directory: Path, file_name: str, weights: dict[str, mx.array], config: dict[str, Any]
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(directory / file_name), weights)
    (directory / CONFIG).write_text(json.dumps(config))
    return directory


def with_adapters(model: LoadedModel, **directories: Path) -> LoadedModel:
    """Return the model with adapters, as a worker loads them. Raises: StartError."""
    named = ",".join(f"{name}={path}" for name, path in directories.items())
    setup = LoraLoader(load_settings({"ADAPTERS": named}, None), lambda _nbytes: None)
    return setup.load(model, lambda path, patterns: WeightsIdentity(path, patterns=patterns))


ADAPTERS = ("", "one", "two", "turned")  # of `adapted`: none, two LoRA, one DoRA


@cache
def adapter_dirs(name: str) -> dict[str, Path]:
    """Return where a fixture's adapters are."""
    directory, model = Path(tempfile.mkdtemp(prefix=f"lora-{name}-")), loaded(name)
    return {
        "one": write_adapter(directory / "one", model, 1),
        "two": write_adapter(directory / "two", model, 2),
        "turned": write_adapter(directory / "turned", model, 3, kind="dora"),
    }


@cache
def adapted(name: str) -> LoadedModel:
    """Return a fixture with the adapters of ADAPTERS."""
    return with_adapters(loaded(name), **adapter_dirs(name))


@cache
def upstream_adapted(name: str, adapter: str) -> LoadedModel:
    """Return a fixture whose model has an adapter for good, put in by mlx-lm itself."""
    model = loaded.__wrapped__(name)
    if adapter:
        load_adapters(model.model, str(adapter_dirs(name)[adapter])).eval()
    return model


def adapted_machine(name: str, model: LoadedModel | None = None, **rules: Any) -> Machine:
    return Machine(model or adapted(name), marks(name), vocabulary(name), **rules)
