"""Tells from a checkpoint's files what its model takes or does. Loads nothing."""

from pathlib import Path
from typing import Any, Final

from hearth.proxy.request.encoder_names import EncoderKind
from hearth.worker.engine.vision.vlm_loader import chat_template, read_json, sees_images

_THINKING_MARKS: Final = ("<think>", "enable_thinking", "reasoning_effort", "<|channel|>")
_RANKS: Final = "ForSequenceClassification"
_POOLING_FILES: Final = ("1_Pooling", "modules.json", "config_sentence_transformers.json")
_ENCODERS: Final = frozenset({"bert", "xlm-roberta", "roberta", "modernbert", "nomic_bert"})
_TEMPLATE_BYTES_MAX: Final = 4 * 1024**2


def encoder_kind(directory: Path, name: str) -> EncoderKind | None:
    """Return what a model called `name` does that answers with no text; None = it may answer so.

    Files tell it, those of sentence-transformers among them. A conversion that has left these out
    is known by its name alone: its config is that of a language model.
    """
    config = read_json(directory / "config.json")
    told = config.get("architectures")
    architectures = [str(each) for each in told] if isinstance(told, list) else []
    if any(each.endswith(_RANKS) for each in architectures) or "rerank" in name.lower():
        return "rerank"
    has_pooling = any((directory / file).exists() for file in _POOLING_FILES)
    if has_pooling or config.get("model_type") in _ENCODERS or "embedding" in name.lower():
        return "embeddings"
    return None


def capabilities(directory: Path) -> tuple[str, ...]:
    """Return what a model that answers with text takes, as far as its files tell."""
    template = _template(directory)
    told = {
        "images": sees_images(directory),
        "tools": "tools" in template,
        "thinking": any(mark in template for mark in _THINKING_MARKS),
    }
    return tuple(name for name, is_taken in told.items() if is_taken)


def _template(directory: Path) -> str:
    """Return the text of a checkpoint's chat template; "" where it has none."""
    file = directory / "chat_template.jinja"
    try:
        if file.is_file() and file.stat().st_size <= _TEMPLATE_BYTES_MAX:
            return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    told: Any = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(told, list):  # several, each with a name
        told = " ".join(str(each.get("template")) for each in told if isinstance(each, dict))
    return told if isinstance(told, str) else chat_template(directory) or ""
