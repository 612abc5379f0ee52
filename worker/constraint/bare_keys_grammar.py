"""Writes grammars of Gemma's calls, `call:name{key:value}`: bare keys, strings between marks."""

from dataclasses import dataclass
from typing import Any, Final

from hearth.shared.errors import RequestError
from hearth.worker.constraint.json_schemas import ToolSchema, characters_max, resolved, whole
from hearth.worker.constraint.lark_builder import LENIENT, Expression, Lark

DEPTH_MAX: Final = 8  # of values in values
SCALAR: Final = {"type": ["number", "boolean", "null"]}


@dataclass(frozen=True, slots=True)
class BareKeys:
    """Writes the grammar of calls in one of Gemma's formats. Immutable."""

    start: str
    end: str
    quote: str  # at both ends of a string
    nests: bool  # whether its parser reads arrays and objects, and braces in strings

    def __call__(self, lark: Lark, tool: ToolSchema) -> Expression:
        body = self._object(lark, tool.contained().schema, 0)
        return lark.row(self.start, "call:", lark.quoted(tool.name), body, self.end)

    def _object(self, lark: Lark, schema: dict[str, Any], depth: int) -> Expression:
        items = []
        for parameter in ToolSchema("", schema).parameters():
            if not self.nests and _is_nested(parameter.schema):
                if parameter.is_required:
                    raise _unwritable(parameter.name)
                continue
            value = self._value(lark, parameter.schema, depth + 1)
            items.append((lark.row(lark.quoted(parameter.name), ":", value), parameter.is_required))
        return lark.row("{", lark.separated(items, ","), "}")

    def _value(self, lark: Lark, schema: Any, depth: int) -> Expression:
        assert 0 < depth <= DEPTH_MAX + 1, depth
        schema = whole(resolved(schema, schema), schema)
        parts = schema.pop("allOf", None)
        for part in parts if isinstance(parts, list) else ():
            part = resolved(part, schema)
            sides = [each for each in (schema, part) if isinstance(each.get("properties"), dict)]
            named = {n: p for each in sides for n, p in each["properties"].items()}
            required = [*schema.get("required", ()), *part.get("required", ())]
            schema = {**part, **schema} | (
                {"properties": named, "required": required} if named else {}
            )
        if depth > DEPTH_MAX:
            return lark.json(SCALAR)
        if choices := _choices(schema):
            return lark.any_of([self._literal(lark, choice) for choice in choices])
        kinds = _kinds(schema)
        return lark.any_of([self._kind(lark, kind, schema, depth) for kind in kinds])

    def _kind(self, lark: Lark, kind: Any, schema: dict[str, Any], depth: int) -> Expression:
        if isinstance(kind, dict):
            return self._value(lark, whole(kind, schema), depth + 1)
        if kind == "string":
            but = "" if self.nests else "}"
            text = lark.text_until(self.quote, characters_max(schema, schema), but)
            return lark.row(self.quote, text)
        if kind == "object":
            return self._object(lark, schema, depth)
        if kind == "array":
            item = self._value(lark, whole(schema.get("items"), schema), depth + 1)
            return lark.row("[", lark.optional(item, lark.repeated(",", item)), "]")
        return lark.json({**schema, "type": kind}, **LENIENT)

    def _literal(self, lark: Lark, value: Any) -> Expression:
        if isinstance(value, str):
            return lark.row(self.quote, lark.quoted(value), self.quote)
        return lark.json({"const": value})


def _unwritable(name: str) -> RequestError:
    return RequestError(
        f"tool_choice asks for a call with the parameter {name!r}, an array or an object, which "
        'this model cannot write. Use tool_choice "auto".',
        code="unsupported_tool_choice",
        param="tool_choice",
    )


def _choices(schema: dict[str, Any]) -> list[Any]:
    """Return the values, strings and other scalars, that a value must be one of; maybe none."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(choices, list):
        return []
    return [choice for choice in choices if not isinstance(choice, dict | list)]


def _kinds(schema: dict[str, Any]) -> list[Any]:
    """Return what a value may be: names of types, or schemas."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and schema[key]:
            return list(schema[key])
    kinds = schema.get("type", "object" if "properties" in schema else ["string", "number"])
    return list(kinds) if isinstance(kinds, list) else [kinds]


def _is_nested(schema: dict[str, Any]) -> bool:
    schema = resolved(schema, schema)
    kinds = _kinds(schema)
    return any(kind in ("array", "object") or isinstance(kind, dict) for kind in kinds)
