"""Reads what a checkpoint that embeds or ranks says about itself, and brings it to this machine.

The files are those of sentence-transformers: modules.json, 1_Pooling/config.json, prompts. What a
model needs and mlx-vlm would leave out is refused, since its vectors would look right.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten, tree_unflatten

from hearth.shared.errors import StartError
from hearth.shared.models.model_path import named_model
from hearth.worker.engine.model_loader import present
from hearth.worker.engine.vision.vlm_loader import read_json

# Of a text: a longer one's masks alone take gigabytes, as mlx-vlm makes them (tokens squared).
TOKENS_MAX: Final = 8_192
DENSE_FILES: Final = "*_Dense/*.safetensors"  # which a language model has none of
_KNOWN_MODULES: Final = ("Transformer", "Pooling", "Normalize", "Dense")
_KNOWN_PACKAGE: Final = "sentence_transformers."
_HAS_DENSE: Final = ("gemma3_text",)  # kinds whose Dense layers mlx-vlm computes
_GELU_ALONE: Final = ("bert", "xlm-roberta")  # kinds that mlx-vlm computes so in any case
# Kinds that mlx-vlm pools so in any case.
_MEAN_ALONE: Final = ("llama_bidirec", "llama_nemotron_vl_embedding", "embedding_gemma2")
_POOLING_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def checkpoint_directory(source: str, setting: str, runs_code: bool) -> Path:
    """Return the directory of what `setting` names, fetched where it is a hub id.

    Raises:
        StartError: it is nothing that can be had, or brings code of its own and not `runs_code`.
    """
    named = named_model(source, setting)
    try:
        directory = present(str(named), runs_code, setting)
        if not isinstance(named, Path):
            snapshot_download(str(named), allow_patterns=[DENSE_FILES])
    except StartError:
        raise
    except Exception as error:  # whatever a hub can raise
        raise cannot_load(setting, source, error) from error
    return directory


def cannot_load(setting: str, source: str, error: object) -> StartError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return StartError(f"{setting} is {source!r}, which cannot be loaded: {reason}")


def check_activation(config: dict[str, Any]) -> None:
    """Raise ValueError where mlx-vlm would compute another activation."""
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu" and config.get("model_type") in _GELU_ALONE:
        raise ValueError(f"its hidden_act is {activation!r}, which is computed as gelu here")


def check_modules(directory: Path, config: dict[str, Any]) -> None:
    """Raise ValueError where the model computes something that mlx-vlm would leave out."""
    check_activation(config)
    for module in _modules(directory):
        kind = str(module.get("type", ""))
        name = kind.rpartition(".")[2]
        if not kind.startswith(_KNOWN_PACKAGE) or name not in _KNOWN_MODULES:
            raise ValueError(f"modules.json names a module that is not known here: {kind}")
        if name != "Dense":
            continue
        told = read_json(directory / str(module.get("path", "")) / "config.json")
        activation = str(told.get("activation_function", "Identity")).rpartition(".")[2]
        if config.get("model_type") not in _HAS_DENSE or activation != "Identity":
            raise ValueError(
                f"modules.json names a Dense layer ({activation}), which is not computed for "
                f"{config.get('model_type')} models"
            )


def _modules(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of modules.json; none where there is no such file.

    Raises ValueError: it is no list of objects.
    """
    try:
        rows = json.loads((directory / "modules.json").read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ValueError(f"modules.json cannot be read: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("modules.json is no list of objects")
    return rows


def pooling_of(directory: Path) -> dict[str, Any] | None:
    """Return the configuration of the Pooling module; None where the checkpoint has none.

    Raises ValueError: it names one that says nothing.
    """
    paths = [
        str(row.get("path", "1_Pooling"))
        for row in _modules(directory)
        if str(row.get("type", "")).endswith("Pooling")
    ]
    path = directory / (paths or ["1_Pooling"])[0]
    told = read_json(path / "config.json")
    if not told and (paths or path.exists()):
        raise ValueError(f"its pooling, {path.name}/config.json, cannot be read")
    return told or None


def pooling_name(pooling: dict[str, Any] | None) -> str:
    """Return what a configuration says is pooled; "default" where there is none."""
    if pooling is None:
        return "default"
    if isinstance(mode := pooling.get("pooling_mode"), str):
        return mode
    return "+".join(name for flag, name in _POOLING_FLAGS.items() if pooling.get(flag)) or "mean"


def check_pooling(pooling: dict[str, Any] | None, model_type: Any) -> None:
    """Raise ValueError where mlx-vlm would pool otherwise than the checkpoint says."""
    name = pooling_name(pooling)
    if model_type in _MEAN_ALONE and name not in ("default", "mean"):
        raise ValueError(f"its pooling is {name}, and {model_type} models are pooled by mean here")


def default_prompt(directory: Path) -> str:
    """Return what the checkpoint says that stands before each text; "" mostly."""
    told = read_json(directory / "config_sentence_transformers.json")
    prompts = told.get("prompts") or {}
    prompt = prompts.get(told.get("default_prompt_name")) if isinstance(prompts, dict) else None
    return prompt if isinstance(prompt, str) else ""


def padding_id(config: dict[str, Any], tokenizer: Any) -> int:
    """Return the token that fills a batch's shorter rows.

    Raises ValueError: the vocabulary has no such token. MLX would read beyond the table.
    """
    told = int(config.get("pad_token_id") or tokenizer.pad_token_id or 0)
    if not 0 <= told < int(config["vocab_size"]):
        raise ValueError(f"its pad_token_id {told:,} is none of {config['vocab_size']:,} tokens")
    return told


def tokens_max(directory: Path, config: dict[str, Any], tokenizer: Any) -> int:
    """Return how many tokens a text may have, by everything that the checkpoint says."""
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int) and str(config.get("model_type")).startswith("xlm"):
        positions -= int(config.get("pad_token_id", 1)) + 1  # the first ones are never used
    told = (
        positions,
        getattr(tokenizer, "model_max_length", None),
        read_json(directory / "sentence_bert_config.json").get("max_seq_length"),
    )
    numbers = (n for n in told if isinstance(n, int | float) and not isinstance(n, bool))
    return min([TOKENS_MAX, *(int(n) for n in numbers if 0 < n < math.inf)])


def compute_in_float32(model: Any) -> None:
    """Have `model` compute in float32, in whatever its matrices are kept.

    In 16 bits the shape of a batch would move a text's vector by more than 1e-6. Only what is small
    is cast, norms, biases and what is looked up: MLX computes in the widest type that it is given.
    """
    lookups = [
        (name, _Float32Lookup(module))
        for name, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding)
    ]
    model.update_modules(tree_unflatten(lookups))
    small = [
        (name, weight.astype(mx.float32))
        for name, weight in tree_flatten(model.parameters())
        if weight.ndim <= 1 and mx.issubdtype(weight.dtype, mx.floating)
    ]
    model.update(tree_unflatten(small))
    mx.eval(model.parameters())


class _Float32Lookup(nn.Module):
    """A table of vectors, of which those that are looked up are float32."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def __call__(self, ids: mx.array) -> mx.array:
        return self.table(ids).astype(mx.float32)

    def as_linear(self, hidden: mx.array) -> mx.array:
        return self.table.as_linear(hidden)


def weights_nbytes(model: Any) -> int:
    return sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))
