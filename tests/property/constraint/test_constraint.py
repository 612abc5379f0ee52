"""Constraints for any schema: an answer that fits, or a refusal that says why."""

import json
import random
from functools import cache
from typing import Any

import jsonschema
import mlx.core as mx
import pytest
from hypothesis import given, strategies as st

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from scripts.fixtures import checkpoint_files
from scripts.harness.constrained_answers import Schemas, closers, constrainer_for, tool, walk
from scripts.harness.model_families import family

BY_DAY = ("qwen3", "qwen3_5", "harmony")  # JSON, tags, messages
FAMILIES = ("qwen3", "qwen3_5", "glm4", "harmony", "llama3", "mistral")
KEYWORDS = (
    *("type", "properties", "required", "items", "enum", "const", "anyOf", "allOf", "oneOf"),
    *("additionalProperties", "$ref", "$defs", "minLength", "maxLength", "pattern", "not"),
    *("prefixItems", "minimum", "multipleOf", "format", "x-guidance", "patternProperties"),
)
WORDS = st.sampled_from(
    ["string", "object", "integer", "#/$defs/a", "#", "#/properties/a", "", "a"]
)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 99)
    | st.floats(allow_nan=False)
    | WORDS
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYWORDS) | st.sampled_from("ab"), inner, max_size=4)
    ),
    max_leaves=12,
)
ANY_SCHEMA = st.dictionaries(st.sampled_from(KEYWORDS), JSON_VALUES, max_size=5)


@cache
def constrainer(name: str) -> GrammarCompiler:
    return constrainer_for(family(name))


@cache
def closing() -> frozenset[int]:
    return closers(family("llama3").tokenizer)


@given(st.integers(0, 2**32))
def test_every_answer_that_ends_fits_its_schema(seed: int) -> None:
    schema = Schemas(seed).one()
    try:
        started = walk(constrainer("llama3"), Constraints(is_json=True, schema=schema), [])
    except RequestError as error:
        assert "not" in str(error)
        return
    if started.roll(random.Random(seed), closing(), 300):
        text = family("llama3").tokenizer.decode(started.tokens)
        jsonschema.validate(json.loads(text), schema)


@given(ANY_SCHEMA)
def test_any_schema_gives_a_guide_or_a_refusal(schema: dict[str, Any]) -> None:
    step(constrainer("llama3"), Constraints(is_json=True, schema=schema), [])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.night) for name in FAMILIES],
)
@given(schema=ANY_SCHEMA, words=st.text(max_size=5))
def test_any_tool_gives_a_guide_or_a_refusal(name: str, schema: Any, words: str) -> None:
    step(constrainer(name), Constraints(tool_choice="required"), [tool(f"f{words}", schema)])


def step(found: GrammarCompiler, constraints: Constraints, tools: list[Any]) -> None:
    """Ask for a guide, and its first token."""
    try:
        guide = found.token_mask(constraints, tools, "", 0)
    except RequestError as error:
        assert error.status == 400
        assert str(error)
        return
    assert guide is not None
    guide.process(mx.array([], dtype=mx.uint32), mx.zeros((1, checkpoint_files.VOCAB_SIZE)))
