"""Loads a model and says what it is. Runs on the inference thread: MLX arrays belong to it."""

import contextlib
import json
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import get_total_parameters, hf_repo_to_path, load

from shared.config import POCKET, Settings
from shared.errors import StartError
from shared.wire import ModelFacts
from worker.engine.pocket import ensure_pocket


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer and what was found out about them."""

    model: Any  # called as model(ids (1, n), cache=...) -> logits (1, n, vocabulary)
    tokenizer: Any
    generation_config: dict[str, Any]
    facts: ModelFacts


def load_model(settings: Settings) -> LoadedModel:
    """Load what MODEL_PATH names; a builtin model is made first where it is missing.

    Raises:
        StartError: it cannot be loaded; one line says why.
    """
    source = settings.model_path
    if source == POCKET:
        source = str(ensure_pocket(settings.model_dir))
    elif source.startswith("builtin:"):
        raise StartError(f"MODEL_PATH is {source!r}; the only builtin model is {POCKET}.")
    else:
        source = _checked(source)
    try:
        with _open_file_limit_kept():
            model, tokenizer, config = load(source, return_config=True)
    except Exception as error:  # whatever a hub, a file or an architecture can raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StartError(f"MODEL_PATH is {source!r}, which cannot be loaded: {reason}") from error
    mx.eval(model.parameters())
    directory = Path(source) if Path(source).exists() else hf_repo_to_path(source)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        generation_config=_generation_config(directory),
        facts=_facts(model, config, source, settings),
    )


def _checked(source: str) -> str:
    """Return the directory or hub id; a mistyped path is told apart before a hub is asked."""
    path = Path(source).expanduser()
    looks_local = source.startswith(("/", ".", "~")) or source.count("/") != 1
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartError(f"MODEL_PATH is {source!r}, a directory without a config.json.")
        return str(path)
    if looks_local:
        raise StartError(
            f"MODEL_PATH is {source!r}, which is neither a directory nor a hub id (owner/name)."
        )
    return source


@contextlib.contextmanager
def _open_file_limit_kept() -> Iterator[None]:
    """mlx_lm lowers the limit of open files, hard limit too, when it loads."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        now_hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, now_hard), now_hard))


def _generation_config(directory: Path) -> dict[str, Any]:
    path = directory / "generation_config.json"
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    return content if isinstance(content, dict) else {}


def _facts(model: Any, config: dict[str, Any], source: str, settings: Settings) -> ModelFacts:
    text = config.get("text_config") or config
    length = text.get("max_position_embeddings") or settings.max_kv_size
    return ModelFacts(
        name=settings.model_name,
        path=source,
        architecture=str(config.get("model_type", "unknown")),
        context_tokens=min(int(length), settings.max_kv_size),
        vocab_size=_vocab_size(model, text),
        parameter_count=int(get_total_parameters(model)),
        weight_bytes=sum(weight.nbytes for _, weight in tree_flatten(model.parameters())),
        cache_layout=cache_layout(make_prompt_cache(model)),
        backend=backend(),
    )


def _vocab_size(model: Any, config: dict[str, Any]) -> int:
    """Return the number of logits; the config's figure, or one forward where it has none."""
    if isinstance(config.get("vocab_size"), int):
        return int(config["vocab_size"])
    size: int = model(mx.array([[0]])).shape[-1]
    return size


def cache_layout(cache: list[Any]) -> str:
    """Return the kinds of cache that the layers keep, e.g. "2 x ArraysCache, 2 x KVCache"."""
    kinds = Counter(_kind(layer) for layer in cache)
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _kind(layer: Any) -> str:
    children = getattr(layer, "caches", None)
    if children is None:
        return type(layer).__name__
    return f"{type(layer).__name__}({', '.join(_kind(child) for child in children)})"


def backend() -> str:
    """Return what computes: "metal", "cuda" or "cpu"."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
