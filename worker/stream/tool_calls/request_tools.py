"""Looks up the tools of a request: their names, and the types of their arguments."""

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

from hearth.shared.written_numbers import object_or_text
from hearth.worker.stream.tool_calls.lenient_json import as_json, json_text

NESTING_MAX: Final = 4  # levels of nested schemas that are searched for types
TYPES_MAX: Final = 200  # types of one argument that are considered
REFERENCE_CHARS_MAX: Final = 1_000  # a longer reference is not followed
_ID: Final = re.compile(r"(?:call|toolu|fc|chatcmpl-tool)[_-]?(?=\w*\d)\w*|\d+", re.ASCII)
_NESTED: Final = frozenset({"array", "object"})
_NOT_TEXT: Final = _NESTED | {"null"}  # types whose values do not look like text
_BY_FIRST: Final = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
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
    """The tools of one request, given in OpenAI's shape. Owner: the inference thread.

    An entry in another shape is ignored.
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

    def known_name(self, name: str) -> str:
        """Return the name of the request's tool that `name` refers to, "" without such a tool."""
        name = name.strip()
        for candidate in (name, name.removeprefix("functions.")):
            if candidate in self._functions:
                return candidate
        return ""

    def called_tool(self, name: str, arguments: str, *, is_id: bool = False) -> str:
        """Return the name of the called tool; `name` is the name or an id.

        An id stands for the one tool that takes all of the arguments and requires no others.
        `is_id`: any name that no tool has counts as an id.
        """
        found, given = self.known_name(name), object_or_text(arguments)
        is_id = is_id or bool(_ID.fullmatch(name.strip()))
        if not found and isinstance(given, dict) and is_id:
            fits = []
            for tool_name in self._functions:
                required = self._parameters(tool_name).get("required")
                is_whole = not isinstance(required, list) or all(key in given for key in required)
                if is_whole and given.keys() <= self.arguments(tool_name).keys():
                    fits.append(tool_name)
            found = fits[0] if len(fits) == 1 else ""
        return found or name.strip()

    def arguments(self, name: str) -> dict[str, Any]:
        """Return the schemas of a tool's arguments by their names."""
        properties = self._parameters(name).get("properties")
        return properties if isinstance(properties, dict) else {}

    def sole_text(self, name: str) -> str:
        """Return the name of a tool's only argument if it is a text; otherwise ""."""
        sole = [*self.arguments(name)]
        return sole[0] if len(sole) == 1 and self.is_text(name, sole[0]) else ""

    def is_text(self, name: str, argument: str) -> bool:
        """Return whether the argument can only be a text."""
        return self._types(name, argument) == {"string"}

    def argument_json(self, name: str, argument: str, text: str, *, guesses: bool = False) -> str:
        """Return the JSON of an argument that a format without types wrote as `text`.

        If the schema allows a text, the value stays that text. Otherwise the text is
        read as JSON, provided that the schema allows the type of the result; digits stay as
        written. If the schema has no type, only lists and objects are read as JSON; with
        `guesses`, all values are.
        """
        types = self._types(name, argument)
        found = as_json(text)
        kinds = {_BY_FIRST[found[0]]} if found[:1] in _BY_FIRST else set[str]()
        if found and found[0] in "-0123456789":
            kinds = {"number", "integer"} if float(found).is_integer() else {"number"}
        may_be = kinds & (types - {"string"} if types else _KINDS.keys() if guesses else _NESTED)
        if "string" in types:
            may_be &= _NOT_TEXT
        return found if may_be else f'"{json_text(text)}"'

    def member_tools(self, name: str, argument: str) -> "RequestTools":
        """Return tools whose arguments are the members of `argument`; a list's items are `item`."""
        root, schema = self._parameters(name), self.arguments(name).get(argument)
        members: dict[str, Any] = {}
        for part in islice(_schemas_of(schema, root, NESTING_MAX), TYPES_MAX):
            members |= part["properties"] if isinstance(part.get("properties"), dict) else {}
            members |= {"item": part["items"]} if "items" in part else {}
        function = {"name": name, "parameters": {**root, "properties": members}}
        return RequestTools([{"function": function}])

    def _types(self, name: str, argument: str) -> set[str]:
        known = self._known_types.get((name, argument))
        if known is None:
            schema = self.arguments(name).get(argument)
            found = _types_of(schema, self._parameters(name))
            known = self._known_types[name, argument] = set(islice(found, TYPES_MAX))
        return known

    def _parameters(self, name: str) -> dict[str, Any]:
        parameters = self._functions.get(name, {}).get("parameters")
        return parameters if isinstance(parameters, dict) else {}


def _types_of(schema: Any, root: dict[str, Any]) -> Iterable[str]:
    """Yield the types that a schema allows; a schema without types yields none."""
    for part in _schemas_of(schema, root, NESTING_MAX):
        declared = part.get("type")
        for kind in declared if isinstance(declared, list) else [declared]:
            if isinstance(kind, str):
                yield kind
        if declared is None and isinstance(values := part.get("enum"), list):
            for value in map(type, values):
                yield next((kind for kind, known in _KINDS.items() if value in known), "string")


def _schemas_of(schema: Any, root: dict[str, Any], depth: int) -> Iterable[dict[str, Any]]:
    """Yield a schema, the alternatives and parts in it, and the schemas that it refers to."""
    if not isinstance(schema, dict) or not depth:
        return
    yield schema
    for choice in ("anyOf", "oneOf", "allOf"):
        for option in schema[choice] if isinstance(schema.get(choice), list) else []:
            yield from _schemas_of(option, root, depth - 1)
    yield from _schemas_of(referenced_schema(schema.get("$ref"), root), root, depth - 1)


def referenced_schema(reference: Any, root: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema at a reference within `root`, for example #/$defs/X or #.

    The reference may name the `$id` of `root`.
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
