"""Tells from a checkpoint's files what its model takes: images, tools, thinking. Loads nothing."""

from pathlib import Path
from typing import Any, Final

from hearth.worker.engine.vision.vlm_loader import chat_template, read_json, sees_images

_THINKING_MARKS: Final = ("<think>", "enable_thinking", "reasoning_effort", "<|channel|>")
_TEMPLATE_BYTES_MAX: Final = 4 * 1024**2


def capabilities(directory: Path) -> tuple[str, ...]:
    """Return what a model takes, as far as its files tell."""
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
