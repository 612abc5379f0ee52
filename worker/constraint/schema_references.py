"""Has the references of a JSON schema lead into its `$defs`, with which each part is complete."""

import json
import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import quote, unquote

from hearth.worker.stream.tool_calls.request_tools import referred

COPIED_CHARS_MAX: Final = 50_000  # each argument of a call may carry them
SHARED: Final = ("$defs", "definitions")  # what each part of a schema carries
_PLAIN: Final = re.compile(r"#/(\$defs|definitions)/[^/]+")
_DATA: Final = ("const", "enum", "default", "examples")  # nothing in them is a schema
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas", *SHARED)


def quoted(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that means the same, whose pointers are written as in URIs."""
    made: dict[str, Any] = _rewritten(
        schema,
        lambda name: (
            quote(unquote(name), safe="#/~$", errors="replace") if name.startswith("#/") else name
        ),
    )
    return made


def self_contained(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that means the same, and refers to nothing in it but what is in its `$defs`.

    What is referred to elsewhere is there too, by its pointer as its name. A reference that leads
    nowhere, or by an anchor, or to too much, stays as it is, and so do parts with an `$id`.
    """
    id_key = "id" if "draft-04" in str(schema.get("$schema")) else "$id"
    root = {key: part for key, part in schema.items() if key != id_key}  # one has the `$id`
    copies: dict[str, Any] = {}
    chars_left = COPIED_CHARS_MAX

    def moved(reference: str) -> str:
        nonlocal chars_left
        target = referred(reference, schema)
        if target is None or _PLAIN.fullmatch(reference):
            return reference
        name = "#" + unquote(reference.partition("#")[2])
        if name not in copies and chars_left > 0:
            chars_left -= len(json.dumps(target))
            copies[name] = None  # it may refer to itself
            copies[name] = _rewritten(root if target is schema else target, moved, id_key)
        known = f"#/$defs/{quote(escaped(name), safe='~', errors='replace')}"
        return known if name in copies else reference

    copy = {**schema, **_rewritten(root, moved, id_key)}
    defs = copy.get("$defs")
    shared = defs if isinstance(defs, dict) else {}
    return {**copy, "$defs": {**shared, **copies}} if copies else schema


def _rewritten(
    node: Any, new: Callable[[str], str], id_key: str = "", is_named: bool = False
) -> Any:
    """Return a schema with `new` references, but for parts in it that have an `id_key`.

    `is_named`: its keys are names that the client gave.
    """
    if isinstance(node, list):
        return [_rewritten(part, new, id_key) for part in node]
    if not isinstance(node, dict):
        return node
    if isinstance(inner := node.get(id_key), str) and not inner.startswith("#"):
        return node
    parts = {
        key: part
        if key in _DATA and not is_named
        else _rewritten(part, new, id_key, not is_named and key in _NAMED)
        for key, part in node.items()
    }
    if isinstance(reference := parts.get("$ref"), str):
        parts["$ref"] = new(reference)
    return parts


def escaped(name: str) -> str:
    """Return a name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
