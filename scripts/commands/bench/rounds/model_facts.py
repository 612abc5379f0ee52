"""Finds the models that are measured, and tells what a reader must know of them. Loads nothing."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hearth.commands.bench.checked_json import shown_text
from hearth.commands.bench.results import ModelFacts
from hearth.shared.errors import StartError
from hearth.shared.models.local_models import local_models, matching_whole, weight_files
from hearth.shared.models.model_path import named_model
from hearth.shared.settings import POCKET
from hearth.worker.engine.vision.vlm_loader import sees_images

_RECURRENT: Final = (
    *("linear_num_value_heads", "full_attention_interval", "mamba_d_ssm", "mamba_num_heads"),
    *("mamba_expand", "ssm_state_size", "hybrid_override_pattern"),
)
_DTYPE_BYTES: Final = {"float32": 4}  # any other that MLX computes in has two
_SAYING: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_END_BYTES: Final = 256 * 1024  # the names and places of tensors stand first
_DIGEST_BYTES: Final = 8
_TYPE_CHARS_MAX: Final = 100
_CONFIG_BYTES_MAX: Final = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model that is measured, and where it lies. Only `facts` are shared."""

    facts: ModelFacts
    directory: Path
    kv_token_bytes: int  # of one token in all layers that keep every token


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
    if named == POCKET:
        from hearth.worker.engine.model_loader import POCKET_DIR  # it imports MLX

        return of_directory(POCKET_DIR, "pocket")
    if isinstance(named, Path):
        return of_directory(named.resolve(), named.resolve().name)
    found = matching_whole(named, local_models())
    if not found:
        raise StartError(f"{name} is not on this disk. Fetch it first: hearth pull {name}")
    return of_directory(found[0].directory, found[0].name.rpartition("/")[2])


def of_directory(directory: Path, label: str) -> BenchModel:
    """Return what the files of a checkpoint tell.

    Raises:
        StartError: it has no readable config.json, or no weights.
        OSError: a file cannot be read.
    """
    config = _config(directory)
    text = _text_config(config)
    nbytes = sum(size for _, size in weight_files(directory))
    if not nbytes:
        raise StartError(f"{label} has no *.safetensors files.")
    quantization = config.get("quantization")
    bits = quantization.get("bits", 0) if isinstance(quantization, dict) else 0
    facts = ModelFacts(
        label=shown_text(label),
        kind="vision" if sees_images(directory) else layers_kind(text),
        architecture=shown_text(str(config.get("model_type", "unknown"))[:_TYPE_CHARS_MAX]),
        bytes=nbytes,
        bits=bits if isinstance(bits, int) else 0,
        digest=files_digest(directory),
    )
    return BenchModel(facts, directory, kv_token_bytes(text))


def files_digest(directory: Path) -> str:
    """Return a digest of what a checkpoint computes and says: small files whole, ends of weights.

    Reading all weights would take a minute; training changes the ends too.
    """
    found = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    small = [directory / name for name in _SAYING if (directory / name).is_file()]
    for path in (*small, *(directory / name for name, _ in weight_files(directory))):
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if path in small:
                found.update(file.read(_CONFIG_BYTES_MAX))
                continue
            found.update(file.read(_END_BYTES))
            file.seek(max(0, size - _END_BYTES))
            found.update(file.read(_END_BYTES))
    return found.hexdigest()


def layers_kind(config: Mapping[str, Any]) -> str:
    """Return what the layers of a text model remember: dense, hybrid or window."""
    layers = config.get("layer_types")
    kinds = {str(each) for each in layers} if isinstance(layers, list) else set()
    if any(config.get(name) for name in _RECURRENT) or any("linear" in kind for kind in kinds):
        return "hybrid"
    has_window = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    is_window = any("sliding" in kind for kind in kinds) or (has_window and not kinds)
    return "window" if is_window else "dense"


def kv_token_bytes(config: Mapping[str, Any]) -> int:
    """Return about how many bytes the KV of one token takes, in the layers that keep them all."""
    layers, kinds = _count(config, "num_hidden_layers"), config.get("layer_types")
    if isinstance(kinds, list):
        layers = sum("full" in str(kind) for kind in kinds) or layers
    elif every := _count(config, "full_attention_interval"):
        layers = max(1, layers // every)
    query_heads = _count(config, "num_attention_heads")
    heads = _count(config, "num_key_value_heads") or query_heads
    width = _count(config, "head_dim") or _count(config, "hidden_size") // max(1, query_heads)
    if rank := _count(config, "kv_lora_rank"):  # latent attention keeps one row for all heads
        heads, width = 1, (rank + _count(config, "qk_rope_head_dim")) // 2
    told = config.get("torch_dtype") or config.get("dtype")
    return max(1, 2 * layers * heads * width * _DTYPE_BYTES.get(str(told), 2))


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        if path.stat().st_size > _CONFIG_BYTES_MAX:
            raise ValueError("it is too large")
        config: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"The model's config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise StartError("The model's config.json is no object.")
    return config
