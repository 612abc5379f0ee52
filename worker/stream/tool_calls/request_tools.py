"""Looks up the tools of a request: their names, and the types of their arguments."""

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

from hearth.shared.written_numbers import object_or_text
from hearth.worker.stream.tool_calls.lenient_json import as_json, json_text

NESTING_MAX: Final = 4  # of schemas within a schema that are looked into for types
TYPES_MAX: Final = 200  # of one argument that are looked at
REFERENCE_CHARS_MAX: Final = 1_000  # of a longer one nothing is looked up
_ID: Final = re.compile(r"(?:call|toolu|fc|chatcmpl-tool)[_-]?(?=\w*\d)\w*|\d+", re.ASCII)
_NESTED: Final = frozenset({"array", "object"})
_NOT_TEXT: Final = _NESTED | {"null"}  # what no text looks like
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

    def known(self, name: str) -> str:
        """Return the name of the tool that is meant by `name`, "" if there is none."""
        name = name.strip()
        for meant in (name, name.removeprefix("functions.")):
            if meant in self._functions:
                return meant
        return ""

    def meant(self, name: str, arguments: str, *, is_id: bool = False) -> str:
        """Return the name of the tool that is called: of an id in its place, the one that fits.

        That is the one tool that takes arguments of these names, all that it requires among them.
        `is_id`: what is no tool's name is an id, whatever it looks like.
        """
        found, given = self.known(name), object_or_text(arguments)
        is_id = is_id or bool(_ID.fullmatch(name.strip()))
        if not found and isinstance(given, dict) and is_id:
            fits = []
            for each in self._functions:
                required = self._parameters(each).get("required")
                is_whole = not isinstance(required, list) or all(key in given for key in required)
                if is_whole and given.keys() <= self.arguments(each).keys():
                    fits.append(each)
            found = fits[0] if len(fits) == 1 else ""
        return found or name.strip()

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

    def fitting(self, name: str, argument: str, text: str, *, guesses: bool = False) -> str:
        """Return as JSON what a format without types wrote as `text`.

        A text that the schema allows stays the text, and digits stay those that were written. Else
        it is the JSON that it reads as, where the schema has that type. `guesses`: also where the
        schema says nothing, and the text is no list and no object.
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

    def within(self, name: str, argument: str) -> "RequestTools":
        """Return what looks up the members of an argument, or its items as `item`."""
        root, schema = self._parameters(name), self.arguments(name).get(argument)
        members: dict[str, Any] = {}
        for each in islice(_schemas_of(schema, root, NESTING_MAX), TYPES_MAX):
            members |= each["properties"] if isinstance(each.get("properties"), dict) else {}
            members |= {"item": each["items"]} if "items" in each else {}
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
    """Yield the types that a schema allows; none where it does not say."""
    for each in _schemas_of(schema, root, NESTING_MAX):
        declared = each.get("type")
        for kind in declared if isinstance(declared, list) else [declared]:
            if isinstance(kind, str):
                yield kind
        if declared is None and isinstance(values := each.get("enum"), list):
            for value in map(type, values):
                yield next((kind for kind, known in _KINDS.items() if value in known), "string")


def _schemas_of(schema: Any, root: dict[str, Any], depth: int) -> Iterable[dict[str, Any]]:
    """Yield a schema, those that it offers instead of or beside it, and that it refers to."""
    if not isinstance(schema, dict) or not depth:
        return
    yield schema
    for choice in ("anyOf", "oneOf", "allOf"):
        for option in schema[choice] if isinstance(schema.get(choice), list) else []:
            yield from _schemas_of(option, root, depth - 1)
    yield from _schemas_of(referred(schema.get("$ref"), root), root, depth - 1)


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
