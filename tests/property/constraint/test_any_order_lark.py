"""A call's arguments may come in any order, each once, and no required one may be missing."""

import json
import os
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from llguidance import LLMatcher, LLTokenizer

from hearth.worker.constraint.any_order_lark import DEPTH_MAX, MEMBERS_MAX, AnyOrderLark
from hearth.worker.constraint.lark_builder import LENIENT
from scripts.harness.constrained_answers import constrainer_for
from scripts.harness.model_families import family

EXAMPLES = int(os.environ.get("HEARTH_EXAMPLES", "60"))
NAMES = ("path", "pattern", "limit", "is_deep", "ünï", 'q"uote')
VALUES = {"string": "Ulm", "integer": 7, "boolean": True}
KINDS = dict(zip(NAMES, (*VALUES, *VALUES), strict=True))


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(constrainer_for(family("qwen3")).tokenizer_config())


def schema_of(required: list[str], names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    properties = {name: {"type": KINDS[name], "description": name} for name in names}
    return {"type": "object", "properties": properties, "required": required}


def is_accepted(schema: dict[str, Any], text: str) -> bool:
    """Return whether a text is a whole value of a schema, blanks as templates write them."""
    lark = AnyOrderLark({}, is_as_templates=True)
    matcher = LLMatcher(tokenizer(), lark.source(lark.json(schema, **LENIENT)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = family("qwen3").tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def written(names: list[str]) -> str:
    pairs = ((json.dumps(name, ensure_ascii=False), VALUES[KINDS[name]]) for name in names)
    return "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in pairs) + "}"


@given(
    required=st.lists(st.sampled_from(NAMES), unique=True),
    names=st.lists(st.sampled_from(NAMES), max_size=len(NAMES) + 1),
)
@settings(max_examples=EXAMPLES)
def test_an_object_may_hold_each_member_once_in_any_order_and_lacks_no_required_one(
    required: list[str], names: list[str]
) -> None:
    is_whole = len(set(names)) == len(names) and set(required) <= set(names)
    assert is_accepted(schema_of(required), written(names)) == is_whole


@given(order=st.permutations(NAMES), outer=st.permutations(("first", "rest")))
@settings(max_examples=EXAMPLES)
def test_objects_within_objects_and_arrays_hold_their_members_in_any_order_too(
    order: list[str], outer: list[str]
) -> None:
    items = {"type": "array", "items": {"$ref": "#/$defs/one"}}
    properties = {"first": {"$ref": "#/$defs/one"}, "rest": items}
    schema = {"type": "object", "properties": properties, "$defs": {"one": schema_of(list(NAMES))}}
    one = written(order)
    values = {"first": one, "rest": f"[{one}, {one}]"}
    text = "{" + ", ".join(f'"{name}": {values[name]}' for name in outer) + "}"
    assert is_accepted(schema, text)
    assert not is_accepted(schema, text.replace(one, "{}", 1))


def test_a_schema_that_refers_to_itself_ends() -> None:
    node: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    schema = {"$ref": "#/$defs/node", "$defs": {"node": node}}
    text = '{"next": ' * (DEPTH_MAX + 2) + "{}" + "}" * (DEPTH_MAX + 2)
    assert is_accepted(schema, text)


@pytest.mark.parametrize("count", [1, 2, MEMBERS_MAX, MEMBERS_MAX + 1])
def test_objects_of_many_members_are_in_the_schemas_order(count: int) -> None:
    names = [f"p{number}" for number in range(count)]
    properties = {name: {"type": "integer"} for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    texts = {
        way: "{" + ", ".join(f'"{name}": 1' for name in order) + "}"
        for way, order in (("in order", names), ("backwards", names[::-1]))
    }
    assert is_accepted(schema, texts["in order"])
    assert is_accepted(schema, texts["backwards"]) == (count <= MEMBERS_MAX)


@pytest.mark.parametrize(
    "more", [{"additionalProperties": True}, {"patternProperties": {"^x": {}}}, {"anyOf": [{}]}]
)
def test_objects_that_may_hold_other_members_are_left_to_llguidance(more: dict[str, Any]) -> None:
    lark = AnyOrderLark({})
    assert "%json" in lark.source(lark.json(schema_of([]) | more)).splitlines()[-1]
