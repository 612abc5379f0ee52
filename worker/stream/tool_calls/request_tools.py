"""Looks up the tools of a request: their names, and the types of their arguments."""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

from hearth.worker.stream.tool_calls.lenient_json import json_text

NESTING_MAX: Final = 4  # of schemas within a schema that are looked into for types
TYPES_MAX: Final = 200  # of one argument that are looked at
REFERENCE_CHARS_MAX: Final = 1_000  # of a longer one nothing is looked up
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
    "string": (str,),
}


class RequestTools:
    """The tools of one request. Owner: the inference thread.

    They come in OpenAI's shape; an entry of another shape is no tool.
    """

    def __init__(self, tools: Iterable[Any]) -> None:
        self._functions = {
            function["name"]: function
            for tool in tools
            if isinstance(tool, dict) and isinstance(function := tool.get("function"), dict)
            if isinstance(function.get("name"), str)
        }
        self._known_types: dict[tuple[str, str], set[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._functions)

    @property
    def names(self) -> list[str]:
        """The names of all tools."""
        return [*self._functions]

    @cached_property
    def rows(self) -> list[Any]:
        """The tools as mlx-lm's parsers take them."""
        return [{"type": "function", "function": each} for each in self._functions.values()]

    def known(self, name: str) -> str:
        """Return the name of the tool that is meant by `name`, "" if there is none."""
        name = name.strip()
        for meant in (name, name.removeprefix("functions.")):
            if meant in self._functions:
                return meant
        return ""

    def arguments(self, name: str) -> dict[str, Any]:
        """Return the schemas of a tool's arguments by their names."""
        properties = self._parameters(name).get("properties")
        return properties if isinstance(properties, dict) else {}

    def sole_text(self, name: str) -> str:
        """Return the one argument that a tool takes, if that is a text; or else ""."""
        sole = [*self.arguments(name)]
        return sole[0] if len(sole) == 1 and self.is_text(name, sole[0]) else ""

    def is_text(self, name: str, argument: str) -> bool:
        """Return whether the argument can be nothing but a text."""
        return self._types(name, argument) == {"string"}

    def fitting(self, name: str, argument: str, value: Any, text: str) -> str:
        """Return as JSON what a format without types wrote as `text`, and its parser read.

        A text is read as the type that the schema wants, where it is of that type; and it stays
        one where the schema wants nothing else.
        """
        types = self._types(name, argument)
        if types == {"string"} and value is not None:
            value = value if isinstance(value, str) else text
        elif types and "string" not in types and isinstance(value, str):
            value = _read_as(types, value)
        return _json(value, text)

    def _types(self, name: str, argument: str) -> set[str]:
        known = self._known_types.get((name, argument))
        if known is None:
            schema = self.arguments(name).get(argument)
            found = _types_of(schema, self._parameters(name), NESTING_MAX)
            known = self._known_types[name, argument] = set(islice(found, TYPES_MAX))
        return known

    def _parameters(self, name: str) -> dict[str, Any]:
        parameters = self._functions.get(name, {}).get("parameters")
        return parameters if isinstance(parameters, dict) else {}


def _types_of(schema: Any, root: dict[str, Any], depth: int) -> Iterable[str]:
    """Yield the types that a schema allows; none where it does not say."""
    if not isinstance(schema, dict) or not depth:
        return
    declared = schema.get("type")
    for kind in declared if isinstance(declared, list) else [declared]:
        if isinstance(kind, str):
            yield kind
    if declared is None and isinstance(values := schema.get("enum"), list):
        for value in values:
            yield next((kind for kind, types in _KINDS.items() if type(value) in types), "string")
    for choice in ("anyOf", "oneOf", "allOf"):
        for option in schema[choice] if isinstance(schema.get(choice), list) else []:
            yield from _types_of(option, root, depth - 1)
    yield from _types_of(referred(schema.get("$ref"), root), root, depth - 1)


def referred(reference: Any, root: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema that a reference within `root`, such as #/$defs/X or #, refers to.

    It may name the `$id` of `root`.
    """
    if not isinstance(reference, str) or len(reference) > REFERENCE_CHARS_MAX:
        return None
    resource, _, pointer = reference.partition("#")
    own = str(root.get("$id") or root.get("id") or "").removesuffix("#")
    if resource not in ("", own, own.rpartition("/")[2]) or not re.match("/|$", pointer):
        return None
    found: Any = root
    for step in unquote(pointer).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, dict) else None


def _read_as(types: set[str], text: str) -> Any:
    """Return the value that `text` is in JSON or Python, if it has one of the types; or `text`."""
    word = text.strip()
    if word in ("True", "False", "None"):
        word = {"True": "true", "False": "false", "None": "null"}[word]
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        return text
    fits = any(type(value) in _KINDS.get(kind, ()) for kind in types)
    return value if fits else text


def _json(value: Any, text: str) -> str:
    """Return the JSON of a value; of the text where it has none, as sets and infinities."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return f'"{json_text(text)}"'
