"""Has the references of a JSON schema lead into its `$defs`, with which each part is complete."""

import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

from hearth.worker.constraint.json_schemas import SHARED, escaped
from hearth.worker.stream.tool_calls.request_tools import referred

_PLAIN: Final = re.compile(r"#/(\$defs|definitions)/[\w.-]+", re.ASCII)
_DATA: Final = ("const", "enum", "default", "examples")  # nothing in them is a schema
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas", *SHARED)


def self_contained(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that means the same, and refers to nothing in it but what is in its `$defs`.

    What is referred to elsewhere is moved there, by the reference as its name. A reference that
    leads nowhere is left for llguidance to judge, and so is a part with an `$id` of its own.
    """
    moved: dict[int, tuple[str, dict[str, Any]]] = {}  # by identity
    for node in _schemas(schema):
        reference = node.get("$ref")
        if isinstance(reference, str) and not _PLAIN.fullmatch(reference):
            target = referred(reference, schema)
            if target is not None:
                moved.setdefault(id(target), (reference, target))

    def body(node: dict[str, Any], is_named: bool = False) -> dict[str, Any]:
        parts = {key: copied(part, key, is_named) for key, part in node.items()}
        target = referred(node.get("$ref"), schema)
        if target is not None and id(target) in moved:
            parts["$ref"] = _pointer(moved[id(target)][0])
        return parts

    def copied(node: Any, key: str, is_named: bool) -> Any:
        if isinstance(node, list) and (is_named or key not in _DATA):
            return [copied(part, "", False) for part in node]
        if not isinstance(node, dict) or _is_left(node, key, is_named):
            return node
        if id(node) in moved:
            return {"$ref": _pointer(moved[id(node)][0])}
        return body(node, key in _NAMED and not is_named)

    if not moved:
        return schema
    shared = body({key: schema[key] for key in SHARED if isinstance(schema.get(key), dict)})
    rest = {key: part for key, part in schema.items() if key not in shared}
    defs = {name: body(rest if part is schema else part) for name, part in moved.values()}
    root = {"$ref": _pointer(moved[id(schema)][0])} if id(schema) in moved else body(rest)
    return {**root, **shared, "$defs": {**shared.get("$defs", {}), **defs}}


def _schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all that may be a schema, in no order."""
    todo: list[tuple[Any, bool]] = [(schema, False)]
    while todo:
        node, is_named = todo.pop()
        if isinstance(node, list):
            todo += [(part, False) for part in node]
        elif isinstance(node, dict):
            yield node
            todo += [
                (part, key in _NAMED and not is_named)
                for key, part in node.items()
                if not _is_left(part, key, is_named)
            ]


def _is_left(node: Any, key: str, is_named: bool) -> bool:
    """Return whether no reference of the schema is in what stands at `key`.

    `is_named`: that key is a name that the client gave.
    """
    if not is_named and key in _DATA:
        return True
    return isinstance(node, dict) and isinstance(node.get("$id"), str)


def _pointer(name: str) -> str:
    return f"#/$defs/{quote(escaped(name), safe='~')}"
