"""Finds Python code that a checkpoint brings along. Reads only; runs and imports nothing.

mlx-vlm runs a config's `model_file` without asking, and transformers what an `auto_map` names, so
this is looked at before any of them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hearth.shared.models.local_models import files_like

PYTHON: Final = "*.py"
CODE_PATTERNS: Final = ("*.json", PYTHON)  # what must be there to tell
NAMED_MAX: Final = 8  # in the text of a refusal
_CONFIGS: Final = "*config*.json"
# Loaders open these names, whatever a directory's list calls what the file system gives them.
_OPENED: Final = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json"),
    *("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
)
_KEYS: Final = ("model_file", "auto_map")


def remote_code(directory: Path) -> list[str]:
    """Return what there is of code in a checkpoint, by name; empty where it is data alone."""
    found = [path.name for path in files_like(directory, [PYTHON])]
    opened = {directory / name for name in _OPENED}
    for path in sorted(opened.union(files_like(directory, [_CONFIGS]))):
        found += [f"{key} in {path.name}" for key in _KEYS if key in set(_keys_set(_read(path)))]
    return found[:NAMED_MAX]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # no loader can read it either


def _keys_set(value: Any) -> Iterator[str]:
    """Yield the names, at any depth, that are set to something."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield from (name for name, inner in node.items() if inner)
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
