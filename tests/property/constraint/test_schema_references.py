"""A schema that was made complete means what it meant, whatever refers to what within it."""

from typing import Any
from urllib.parse import quote

import jsonschema
from hypothesis import given, strategies as st

from hearth.worker.constraint.json_schemas import pointer_step, self_contained, with_definitions

NAMES = ("a", "b", "x/y", "~t", "50%", "", "$ref", "const", "properties", "ü n")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "s", "$ref"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=6,
)
SCALARS = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "string"},
        {"type": "null"},
        {"const": {"$ref": "#/properties/a"}},
        {"enum": ["s", {"$ref": "#"}]},
        {"type": "integer", "minimum": 1},
        {},
    ]
)
PLACES = [
    f"#/{part}/{quote(pointer_step(name))}" for part in ("properties", "$defs") for name in NAMES
]
REFERENCES = st.sampled_from(
    [*PLACES, "#/parts/a", "#/anyOf/0", "#/anyOf/1/properties/a", "#", "#/properties/x~1y"]
).map(lambda place: {"$ref": place})


def named(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(NAMES), parts, max_size=4)


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.builds(lambda parts: {"properties": parts}, named(inner))
        | st.builds(lambda part: {"items": part}, inner)
        | st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=2))
        | st.builds(lambda part, row: {**part, **row}, REFERENCES, SCALARS)
    )


# A reference stands below `properties` or `items`, so that none leads to itself without a step.
PARTS = st.recursive(SCALARS | REFERENCES, grown, max_leaves=6)
SCHEMAS = st.fixed_dictionaries(
    {"properties": named(PARTS)},
    optional={"$defs": named(PARTS), "parts": named(PARTS), "anyOf": st.lists(PARTS, min_size=1)},
)


def verdict(schema: Any, value: Any) -> str:
    """Return whether `value` is valid; or that a reference leads nowhere, or to itself."""
    try:
        return str(jsonschema.Draft202012Validator(schema).is_valid(value))
    except (jsonschema.exceptions._WrappedReferencingError, RecursionError):
        return "nowhere"


@given(SCHEMAS, st.lists(VALUES, min_size=3, max_size=6))
def test_a_schema_made_complete_has_the_same_instances(
    schema: dict[str, Any], values: list[Any]
) -> None:
    made = self_contained(schema)
    for value in values:
        assert verdict(made, value) == verdict(schema, value)


@given(SCHEMAS, st.lists(VALUES, min_size=3, max_size=6))
def test_each_part_of_a_schema_made_complete_means_the_same_alone(
    schema: dict[str, Any], values: list[Any]
) -> None:
    """A parameter is a document of its own in the formats that write calls in tags."""
    made = self_contained(schema)
    for name in schema["properties"]:
        alone = with_definitions(made["properties"][name], made)
        place = {"$ref": f"urn:s#/properties/{quote(pointer_step(name))}"}
        document = {"$defs": {"s": {**schema, "$id": "urn:s"}}, **place}
        for value in values:
            assert (said := verdict(document, value)) in ("nowhere", verdict(alone, value)), said
