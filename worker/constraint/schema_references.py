"""Has the references of a JSON schema lead into its `$defs`, with which each part is complete."""

import json
import re
from typing import Any, Final
from urllib.parse import quote

from hearth.worker.constraint.json_schemas import SHARED, escaped
from hearth.worker.stream.tool_calls.request_tools import referred

COPIED_CHARS_MAX: Final = 50_000  # each argument of a call may carry them
_PLAIN: Final = re.compile(r"#/(\$defs|definitions)/[\w.-]+", re.ASCII)
_DATA: Final = ("const", "enum", "default", "examples")  # nothing in them is a schema
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas", *SHARED)


def self_contained(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that means the same, and refers to nothing in it but what is in its `$defs`.

    What is referred to elsewhere is there too, by the reference as its name. A reference that
    leads nowhere, or too much, is left for llguidance to judge, and so are parts with an `$id`.
    """
    copies: dict[str, Any] = {}
    chars_left = COPIED_CHARS_MAX

    def copied(node: Any, is_named: bool = False) -> Any:
        """`is_named`: its keys are names that the client gave."""
        nonlocal chars_left
        if isinstance(node, list):
            return [copied(part) for part in node]
        if not isinstance(node, dict) or (isinstance(node.get("$id"), str) and node is not schema):
            return node
        parts = {
            key: part
            if key in _DATA and not is_named
            else copied(part, not is_named and key in _NAMED)
            for key, part in node.items()
        }
        name = node.get("$ref")
        target = referred(name, schema)
        if isinstance(name, str) and target is not None and not _PLAIN.fullmatch(name):
            if name not in copies and chars_left > 0:
                chars_left -= len(json.dumps(target))
                copies[name] = None  # it may refer to itself
                copies[name] = copied(target)
            if name in copies:
                parts["$ref"] = f"#/$defs/{quote(escaped(name), safe='~')}"
        return parts

    copy: dict[str, Any] = copied(schema)
    return {**copy, "$defs": {**(copy.get("$defs") or {}), **copies}} if copies else schema
