"""Reads JSON schemas: a tool's parameters, references and patterns, and the place of a fault."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote, unquote

from hearth.worker.stream.tool_calls.request_tools import referenced_schema

HOPS_MAX: Final = 16  # references in a row that are followed
CHOICES_DEPTH_MAX: Final = 4  # levels of choices within choices
CHOICES_MAX: Final = 256  # choices of all levels; a value with more choices is JSON
CHARACTERS_MAX: Final = 10_000  # a higher limit on text is not enforced
TRIES_MAX: Final = 200  # parts of a faulty schema that are tried
MOVED: Final = "#/$defs/#"  # beginning of a reference whose target was moved into $defs
_LACKING: Final = re.compile("does not exist|not present in a registry")  # llguidance's words
_COMBINERS: Final = ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")
_BY_NAME: Final = ("properties", "patternProperties")
# Each keyword applies to members or items that the listed keywords do not name. Without the listed
# keywords, it would forbid more.
_ALL_OTHERS: Final = {
    "additionalProperties": _BY_NAME,
    "unevaluatedProperties": _BY_NAME,
    "items": ("prefixItems",),
    "unevaluatedItems": ("prefixItems",),
}
_BY_NUMBER: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE: Final = ("items", "additionalProperties", "not")
_TYPED: Final = ("type", "enum", "const", "properties", "items", "anyOf", "oneOf", "allOf")
COPIED_CHARS_MAX: Final = 50_000  # characters copied from targets, for each argument
SHARED: Final = ("$defs", "definitions")  # definitions that each part of a schema needs
_PLAIN: Final = re.compile(r"#/(\$defs|definitions)/[^/]+")
_DATA: Final = ("const", "enum", "default", "examples")  # keywords with values, not schemas
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas", *SHARED)
REPEATS_MAX: Final = 10**12  # a higher count is cut to this
_PIECE: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<low>\d{1,12})(?:,(?P<high>\d{0,12}))?\}|.", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a tool. Immutable."""

    name: str
    schema: dict[str, Any]  # the schema with the definitions that its references need
    is_required: bool


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool that may be called; `schema` describes its arguments, an object. Immutable."""

    name: str
    schema: dict[str, Any]

    def contained(self) -> "ToolSchema":
        """Return the tool with a schema whose references all lead into its `$defs`."""
        return replace(self, schema=self_contained(self.schema))

    def parameters(self) -> list[Parameter]:
        """Return the tool's parameters in the schema's order."""
        root = resolved(self.schema, self.schema)
        known = _mapping(root.get("properties"))
        required = root.get("required")
        required = required if isinstance(required, list) else []
        needed = dict.fromkeys(name for name in required if isinstance(name, str))
        names = dict.fromkeys([*known, *needed])
        return [
            Parameter(name, with_definitions(known.get(name, {}), self.schema), name in needed)
            for name in names
        ]


def tool_of(function: Mapping[str, Any]) -> ToolSchema:
    """Return the tool of a function definition in OpenAI's API.

    The tool takes no parameters that the schema does not name, unless the schema allows them.
    """
    schema = {"type": "object", **_mapping(function.get("parameters"))}
    if not any(key in schema for key in (*_COMBINERS, "additionalProperties")):
        schema["additionalProperties"] = False
    return ToolSchema(str(function.get("name", "")), schema)


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target of a schema that is a reference; any other schema as it is."""
    for _ in range(HOPS_MAX):
        target = referenced_schema(_mapping(schema).get("$ref"), root)
        if target is None:
            break
        schema = target
    return _mapping(schema)


def with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of `root` with the definitions of `root`."""
    return {**{key: root[key] for key in SHARED if key in root}, **_mapping(schema)}


def is_text(schema: Any, root: Mapping[str, Any]) -> bool:
    """Return whether formats without types write the value as bare text: a string or null."""
    return _is_text(schema, root, CHOICES_DEPTH_MAX, iter(range(CHOICES_MAX)))


def _is_text(schema: Any, root: Mapping[str, Any], depth: int, left: Iterator[int]) -> bool:
    """`left` yields an item for each schema that may still be read."""
    if not depth or next(left, None) is None:
        return False
    schema = resolved(schema, root)
    if "$ref" in schema:  # only llguidance may find its target
        return False
    if not any(key in schema for key in _TYPED):
        return True
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            kinds = [resolved(choice, root) for choice in schema[key][:CHOICES_MAX]]
            others = [kind for kind in kinds if kind.get("type") != "null"]
            return bool(others) and all(_is_text(kind, root, depth - 1, left) for kind in others)
    if "type" not in schema:
        return allowed_strings(schema, root) is not None
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return "string" in types and all(kind in ("string", "null") for kind in types)


def allowed_strings(schema: Any, root: Mapping[str, Any]) -> list[str] | None:
    """Return the strings that a value is limited to; None without such a limit."""
    schema = resolved(schema, root)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(choices, list) or not choices:
        return None
    return choices if all(isinstance(choice, str) for choice in choices) else None


def characters_max(schema: Any, root: Mapping[str, Any]) -> int | None:
    """Return how many characters a text may have, None without a usable limit."""
    longest = resolved(schema, root).get("maxLength")
    return longest if type(longest) is int and 0 <= longest <= CHARACTERS_MAX else None


def find_fault(schema: dict[str, Any], error_of: Callable[[Any], str]) -> tuple[str, str]:
    """Return the JSON pointer of the part that cannot be compiled, and the error there.

    `error_of` returns "" for a schema that can be compiled. The part is the smallest that cannot be
    compiled on its own.
    """
    pointer, error = "", error_of(schema)
    node = root = self_contained(schema)
    tries = iter(range(TRIES_MAX))
    while True:
        for _, (step, part) in zip(tries, _parts(node, root), strict=False):
            part_error = error_of(with_definitions(part, root))
            # A part on its own may lack the target of a reference by an $anchor or an $id.
            if part_error and (not _LACKING.search(part_error) or _LACKING.search(error)):
                pointer = step if step.startswith("#") else pointer + step
                error, node = part_error, part
                break
        else:
            return pointer.removeprefix("#") or "/", error


def widened(
    schema: dict[str, Any], error_of: Callable[[Any], str], error_of_whole: Callable[[Any], str]
) -> tuple[dict[str, Any], list[str]]:
    """Return a schema that can be compiled, and the keywords of `schema` that were left out.

    All other keywords are kept. `error_of` tests a part, as in `find_fault`. `error_of_whole` tests
    a whole schema, because a format of calls may make several documents of one schema.
    """
    if not error_of_whole(schema):
        return schema, []
    root, left_out, seen = deepcopy(self_contained(schema)), list[str](), set[int]()

    def error_with(node: dict[str, Any], kept: dict[str, Any]) -> str:
        return error_of_whole(kept) if node is root else error_of(with_definitions(kept, root))

    def widen(node: dict[str, Any]) -> None:
        if id(node) in seen or not error_with(node, node):
            return
        seen.add(id(node))
        for _, part in _parts(node, root):
            if isinstance(part, dict):
                widen(part)
        if error_with(node, node):
            kept, lacking = dict[str, Any](), set[str]()
            for key, value in sorted(node.items(), key=lambda item: item[0] in _ALL_OTHERS):
                if key in _BY_NAME:  # a value that is no schema becomes an empty schema
                    named = _mapping(value).items()
                    value = {n: p if isinstance(p, dict | bool) else {} for n, p in named}
                is_all = not lacking.isdisjoint(_ALL_OTHERS.get(key, ()))
                if is_all or error_with(node, {**kept, key: value}):
                    lacking.add(key)
                else:
                    kept[key] = value
            left_out.extend(lacking)
            node.clear()
            node.update(kept)

    widen(root)
    return root, left_out


def _parts(node: Any, root: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (step, schema) for each schema in a schema; a step from the root begins with "#"."""
    if not isinstance(node, dict):
        return
    for key in _BY_NAME:
        for name, part in _mapping(node.get(key)).items():
            yield f"/{key}/{pointer_step(name)}", part
    for key in _BY_NUMBER:
        for number, part in enumerate(node[key] if isinstance(node.get(key), list) else ()):
            yield f"/{key}/{number}", part
    for key in _ALONE:
        if isinstance(node.get(key), dict):
            yield f"/{key}", node[key]
    target = referenced_schema(node.get("$ref"), root)
    if target is not None and target is not node:
        pointer = unquote(str(node["$ref"]))
        if pointer.startswith(MOVED):  # return the pointer that the client wrote
            pointer = "#" + pointer.removeprefix(MOVED).replace("~1", "/").replace("~0", "~")
        yield pointer, target


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# ---------------------------------------------------------------- references


def with_quoted_references(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an equivalent schema with all pointers percent-encoded, as in URIs."""
    rewritten: dict[str, Any] = _rewritten(
        schema,
        lambda name: (
            quote(unquote(name), safe="#/~$", errors="replace") if name.startswith("#/") else name
        ),
    )
    return rewritten


def self_contained(schema: dict[str, Any]) -> dict[str, Any]:
    """Return an equivalent schema whose references all lead into its `$defs`.

    Targets outside of `$defs` are copied there, named by their pointers. A reference
    stays as it is if it names an anchor, or if the target is missing or too large. A part with an
    `$id` stays as it is, too.
    """
    id_key = "id" if "draft-04" in str(schema.get("$schema")) else "$id"
    root = {key: part for key, part in schema.items() if key != id_key}  # root without `$id`
    copies: dict[str, Any] = {}
    chars_left = COPIED_CHARS_MAX

    def moved(reference: str) -> str:
        nonlocal chars_left
        target = referenced_schema(reference, schema)
        if target is None or _PLAIN.fullmatch(reference):
            return reference
        name = "#" + unquote(reference.partition("#")[2])
        if name not in copies and chars_left > 0:
            chars_left -= len(json.dumps(target))
            copies[name] = None  # a target may refer to itself
            copies[name] = _rewritten(root if target is schema else target, moved, id_key)
        known = f"#/$defs/{quote(pointer_step(name), safe='~', errors='replace')}"
        return known if name in copies else reference

    copy = {**schema, **_rewritten(root, moved, id_key)}
    defs = copy.get("$defs")
    shared = defs if isinstance(defs, dict) else {}
    return {**copy, "$defs": {**shared, **copies}} if copies else schema


def _rewritten(
    node: Any, new: Callable[[str], str], id_key: str = "", is_named: bool = False
) -> Any:
    """Return a schema with references rewritten by `new`, except in parts with an `id_key`.

    `is_named`: the keys of `node` are names from the client.
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


def pointer_step(name: str) -> str:
    """Return a name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


# ---------------------------------------------------------------- patterns


@dataclass(frozen=True, slots=True)
class SchemaPattern:
    """A pattern in a schema, with its JSON pointer and the count of `repeats`. Immutable."""

    pointer: str
    pattern: str
    repeats: int

    def __str__(self) -> str:
        return (
            f"{self.pattern[:200]!r} at {self.pointer}, which repeats a part {self.repeats:,} times"
        )


def repeats(pattern: str) -> int:
    """Return the highest number of repeats of a part of a pattern, 1 without repeats.

    Counts of nested repeats are multiplied. `*` and `+` count as 1: they cost as much as one
    character.
    """
    inner, last, most = [1], 1, 1
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if text == "(":
            inner.append(1)
        elif text == ")" and len(inner) > 1:
            last = inner.pop()
            inner[-1] = max(inner[-1], last)
        elif piece["low"]:
            count = max(int(piece["low"]), int(piece["high"] or 0))
            last = min(last * max(count, 1), REPEATS_MAX)
            inner[-1] = max(inner[-1], last)
        else:
            last = 1
        most = max(most, last)
    return most


def patterns_of(schema: Any) -> list[SchemaPattern]:
    """Return all patterns of a schema, those for property names included."""
    found, todo = list[SchemaPattern](), [("", schema)]
    while todo:
        pointer, node = todo.pop()
        if isinstance(node, dict):
            if isinstance(node.get("pattern"), str):
                pattern = node["pattern"]
                found.append(SchemaPattern(f"{pointer}/pattern", pattern, repeats(pattern)))
            found += [
                SchemaPattern(
                    f"{pointer}/patternProperties/{pointer_step(name)}", name, repeats(name)
                )
                for name in _mapping(node.get("patternProperties"))
            ]
            todo += [(f"{pointer}/{pointer_step(str(key))}", part) for key, part in node.items()]
        elif isinstance(node, list):
            todo += [(f"{pointer}/{number}", part) for number, part in enumerate(node)]
    return found
