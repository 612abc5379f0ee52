"""Checks what is read from JSON schemas: types, choices, limits, parameters, places of faults."""

from typing import Any

import pytest

from hearth.worker.constraint.json_schemas import (
    allowed_strings,
    characters_max,
    find_fault,
    is_text,
    resolved,
    self_contained,
    tool_of,
    with_definitions,
)

DEFS = {"$defs": {"Word": {"type": "string"}, "Count": {"type": "integer"}}}


def faulty(part: Any) -> str:
    """Say no to every schema that has the word BAD anywhere, or refers to one."""
    text = str({k: v for k, v in part.items() if k != "$defs"})
    is_bad = "BAD" in text or ("#/$defs/Rotten" in text and "$defs" in part)
    return "it is bad" if is_bad else ""


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["string", "null"]},
        {"$ref": "#/$defs/Word"},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"enum": ["a", "b"]},
        {"const": "a"},
        {"description": "anything"},
        {},
    ],
)
def test_what_is_a_string_or_nothing_is_text(schema: dict[str, Any]) -> None:
    assert is_text(schema, DEFS)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer"},
        {"type": ["string", "integer"]},
        {"type": "null"},
        {"$ref": "#/$defs/Count"},
        {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        {"anyOf": [{"type": "null"}]},
        {"enum": ["a", 1]},
        {"properties": {}},
        {"$ref": "#/$defs/Lost", "type": "array"},
    ],
)
def test_what_may_be_anything_else_is_json(schema: dict[str, Any]) -> None:
    assert not is_text(schema, DEFS)


def test_the_strings_to_choose_from_are_found_where_they_are_all_there_is() -> None:
    assert allowed_strings({"enum": ["a", "b"]}, {}) == ["a", "b"]
    assert allowed_strings({"const": "a"}, {}) == ["a"]
    assert allowed_strings({"enum": ["a", 1]}, {}) is None
    assert allowed_strings({"enum": []}, {}) is None
    assert allowed_strings({"type": "string"}, {}) is None


def test_only_a_sensible_limit_of_a_text_is_one() -> None:
    assert characters_max({"maxLength": 5}, {}) == 5
    assert [characters_max({"maxLength": n}, {}) for n in (-1, 10**6, "5", True)] == [None] * 4


def test_parameters_come_in_the_schemas_order_with_what_they_refer_to() -> None:
    schema = {"properties": {"b": {"$ref": "#/$defs/Word"}, "a": True}, "required": ["c", "b"]}
    found = tool_of({"name": "f", "parameters": {**schema, **DEFS}}).parameters()
    assert [(each.name, each.is_required) for each in found] == [
        ("b", True),
        ("a", False),
        ("c", True),
    ]
    assert found[0].schema == {"$ref": "#/$defs/Word", **DEFS}


@pytest.mark.parametrize("parameters", [None, {}, 5, {"properties": [1], "required": "x"}])
def test_a_tool_without_sensible_parameters_has_none(parameters: Any) -> None:
    assert tool_of({"name": "f", "parameters": parameters}).parameters() == []


def test_a_model_invents_no_parameters_unless_the_schema_says_so() -> None:
    said = {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}}
    assert tool_of({"name": "f"}).schema["additionalProperties"] is False
    assert tool_of({"name": "f", "parameters": said}).schema == said
    either: dict[str, Any] = {"anyOf": [{"properties": {"a": {}}}]}
    assert "additionalProperties" not in tool_of({"name": "f", "parameters": either}).schema


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"BAD": 1}, "/"),
        ({"properties": {"a": {"items": {"BAD": 1}}, "b": {}}}, "/properties/a/items"),
        ({"properties": {"x/y~": {"BAD": 1}}}, "/properties/x~1y~0"),
        ({"anyOf": [{}, {"prefixItems": [{}, {"BAD": 1}]}]}, "/anyOf/1/prefixItems/1"),
        ({"additionalProperties": {"oneOf": [{"BAD": 1}]}}, "/additionalProperties/oneOf/0"),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/Rotten"}},
                "$defs": {"Rotten": {"not": {"BAD": 1}}},
            },
            "/$defs/Rotten/not",
        ),
    ],
)
def test_the_place_of_a_fault_is_the_smallest_part_that_has_it(
    schema: dict[str, Any], place: str
) -> None:
    assert find_fault(schema, faulty) == (place, "it is bad")


def test_a_schema_without_fault_has_no_place() -> None:
    assert find_fault({"properties": {"a": {}}}, faulty)[1] == ""


def test_the_search_for_a_fault_ends_on_a_schema_that_refers_to_itself() -> None:
    node: dict[str, Any] = {"$ref": "#/$defs/Rotten"}
    place, said = find_fault({**node, "$defs": {"Rotten": node}}, faulty)
    assert (place, said) == ("/$defs/Rotten", "it is bad")


@pytest.mark.parametrize(
    ("reference", "leads_to"),
    [
        ("#/properties/a", {"type": "integer"}),
        ("#/properties/c~1d%25", {"type": "null"}),
        ("#/properties/e/anyOf/1", {"type": "boolean"}),
    ],
)
def test_what_is_referred_to_anywhere_in_a_schema_is_in_its_definitions(
    reference: str, leads_to: dict[str, Any]
) -> None:
    properties = {
        "a": {"type": "integer"},
        "b": {"$ref": reference},
        "c/d%": {"type": "null"},
        "e": {"anyOf": [{}, {"type": "boolean"}]},
        "f": {"const": {"$ref": reference}},
    }
    made = self_contained({"properties": properties})
    part = with_definitions(made["properties"]["b"], made)
    assert resolved(part, part) == leads_to
    assert made["properties"]["f"] == properties["f"], "data is no schema"


def test_a_schema_that_refers_to_its_definitions_alone_is_left_as_it_is() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/Word"}, "b": {"$ref": "#/lost"}}, **DEFS}
    assert self_contained(schema) is schema
