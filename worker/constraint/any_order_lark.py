"""Builds grammars of calls whose arguments come in any order, as a model may write them.

Drafts follow them. What is enforced has the schema's order (`lark_builder`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hearth.worker.constraint.json_schemas import ToolSchema, resolved, whole
from hearth.worker.constraint.lark_builder import NOTHING, Expression, Lark

MEMBERS_MAX: Final = 64  # of one object: the bits in which llguidance keeps which of them came
DEPTH_MAX: Final = 4  # of objects in objects; deeper ones are in the schema's order
NUMBERED: Final = "::_ "  # behind a rule's name: it stands for a rule of each number
# What says nothing of a value, and keywords beside which an object or array is what it seems.
_ABOUT: Final = frozenset(("$comment", "$schema", "default", "description", "examples", "title"))
_SHARED: Final = _ABOUT | {"type", "$defs", "definitions"}
_OBJECT: Final = _SHARED | {"properties", "required", "additionalProperties"}
_ARRAY: Final = _SHARED | {"items"}


class AnyOrderLark(Lark):
    """A grammar in which each member of an object may come once, at any place.

    An object whose schema does not say that it may have other members has none.
    Owner: the thread that drafts' grammars are compiled on.
    """

    def __init__(self, marks: Mapping[str, int], is_as_templates: bool = False) -> None:
        super().__init__(marks, is_as_templates)
        self._values: dict[str, Expression] = {}  # by schema: most are any text, and one rule

    def json(self, schema: Mapping[str, Any], **options: Any) -> Expression:
        """Return a JSON value of this schema."""
        return self._value(schema, options, 0)

    def elements(self, items: Sequence[tuple[str, bool]]) -> Expression:
        """Return items (expression, is required) in any order, one behind the other."""
        return self.separated(items, "")

    def separated(self, items: Sequence[tuple[str, bool]], separator: str) -> Expression:
        """Return items (expression, is required) in any order, a separator between each two.

        A number says which ones came, a bit each, so that the grammar grows with the items and not
        with their orders.
        Source: https://github.com/guidance-ai/llguidance/blob/main/docs/parametric.md
        """
        if not 1 < len(items) <= MEMBERS_MAX:
            return super().separated(items, separator)
        required_first = sorted(items, key=lambda item: not item[1])
        required_count = sum(is_required for _, is_required in items)
        rows = [self.rule(item) for item, _ in required_first]
        later = self.next_name
        end = f'"" %if is_ones([0:{required_count}])' if required_count else NOTHING
        behind = (
            f"{self.row(separator, row)} {later}::set_bit({bit}) %if bit_clear({bit})"
            for bit, row in enumerate(rows)
        )
        self.rule(" | ".join((end, *behind)), NUMBERED)
        first = [f"{row} {later}::{1 << bit:#x}" for bit, row in enumerate(rows)]
        return self.rule(" | ".join(first if required_count else (NOTHING, *first)))

    def _value(
        self, schema: Mapping[str, Any], options: Mapping[str, Any], depth: int
    ) -> Expression:
        said = {key: value for key, value in schema.items() if key not in _ABOUT}
        name = json.dumps((said, depth))
        if name not in self._values:
            part = resolved(said, said)
            if depth < DEPTH_MAX and _has_named_members(part):
                made = self._object(whole(part, said), options, depth)
            elif depth < DEPTH_MAX and _has_items(part):
                made = self._array(whole(part, said), options, depth)
            else:
                made = super().json(said, **options)
            self._values[name] = made
        return self._values[name]

    def _object(self, schema: dict[str, Any], options: Mapping[str, Any], depth: int) -> Expression:
        items = []
        for parameter in ToolSchema("", schema).parameters():
            value = self._value(parameter.schema, options, depth + 1)
            key = self.quoted(json.dumps(parameter.name, ensure_ascii=False))
            items.append((self.row(key, self._between(":"), value), parameter.is_required))
        return self.rule(self.row("{", self.separated(items, self._between(",")), "}"))

    def _array(self, schema: dict[str, Any], options: Mapping[str, Any], depth: int) -> Expression:
        item = self._value(whole(schema["items"], schema), options, depth + 1)
        more = self.repeated(self._between(","), item)
        return self.rule(self.row("[", self.optional(item, more), "]"))

    def _between(self, sign: str) -> str:
        """Return a sign of JSON and the blank behind it, which is not sure but in templates."""
        return f"{sign} " if self.is_as_templates else Expression(f"/{sign} ?/")


def _has_named_members(schema: Mapping[str, Any]) -> bool:
    """Return whether a value is an object whose members are all named, and nothing more is said."""
    return (
        schema.get("type") == "object"
        and schema.keys() <= _OBJECT
        and not schema.get("additionalProperties")
        and bool(schema.get("properties"))
    )


def _has_items(schema: Mapping[str, Any]) -> bool:
    """Return whether a value is an array of any length, of items that are alike."""
    is_alone = schema.keys() <= _ARRAY and isinstance(schema.get("items"), dict)
    return schema.get("type") == "array" and is_alone
