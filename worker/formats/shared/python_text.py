"""Writes a call in Python, for formats and for prompts."""

import json
import keyword
import unicodedata
from typing import Any

from hearth.shared import written_numbers


def python_text(name: str, arguments: dict[str, Any]) -> str:
    """Return a call; arguments with names that are no Python identifiers stand in `**{}`."""
    named = {
        key: value
        for key, value in arguments.items()
        if key.isidentifier()
        and unicodedata.normalize("NFKC", key) == key  # Python leaves the name as it is
        and not keyword.iskeyword(key)
    }
    others = {key: value for key, value in arguments.items() if key not in named}
    written = [f"{key}={_python(value)}" for key, value in named.items()]
    shown = [*written, f"**{_python(others)}"] if others else written
    return f"{name}({', '.join(shown)})"


def _python(value: Any) -> str:
    """Return a value of JSON as a Python literal on one line."""
    # Loops, unlike comprehensions, take one frame per level: any depth of a request fits.
    parts = []
    if isinstance(value, dict):
        for key, item in value.items():
            parts.append(f"{json.dumps(key, ensure_ascii=False)}: {_python(item)}")
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list):
        for item in value:
            parts.append(_python(item))
        return "[" + ", ".join(parts) + "]"
    is_word = value is None or isinstance(value, bool)
    return repr(value) if is_word else written_numbers.dumps(value)
