"""Attacks the following of calls with tools that are bombs, and calls that fit in many ways."""

import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.call_drafts import CALL_BYTES_MAX, CallDrafts
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.constraint.text_shape import (
    POSITIONS_MAX,
    REST_BYTES_MAX,
    STEPS_MAX,
    Literal,
    advance,
    forced_text,
    start_positions,
)
from scripts.harness.constrained_answers import constrainer_for, tool
from scripts.harness.model_families import family

# Calls of functions, in place of seconds.
MAKING_CALLS_MAX = 5_000_000  # the bombs took from 3 s to for ever
STEP_CALLS_MAX = 200_000  # on the inference thread; they took from 0.6 s to for ever
BEGIN = '<tool_call>\n{"name": "f", "arguments": {'


@contextmanager
def within(calls_max: int) -> Iterator[None]:
    """Fail as soon as more functions are called, so that a bomb is not waited for."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")
        if count > calls_max:
            sys.setprofile(None)
            raise AssertionError(f"over {calls_max:,} calls")

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def an_object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **more}


def at_4_000_places(node: dict[str, Any]) -> dict[str, Any]:
    each = an_object({f"b{n}": {"$ref": "#/$defs/n"} for n in range(16)})
    return an_object({f"a{n}": each for n in range(250)}, **{"$defs": {"n": node}})


def choices_of_choices(count: int) -> dict[str, Any]:
    names = "ABCD"
    defs: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{other}"}] * count}
        for name, other in itertools.pairwise(names)
    }
    defs["D"] = {"type": "string"}
    return an_object({"a": {"$ref": "#/$defs/A"}}, **{"$defs": defs})


NAMES = [f"p{n}" for n in range(10_000)]
MANY = [f"p{n}" for n in range(30_000)]
BOMBS: dict[str, dict[str, Any]] = {
    "a large object at many places": at_4_000_places(an_object({key: {} for key in NAMES})),
    "the same type many times": at_4_000_places(
        {"type": ["object"] * 256, "properties": {key: {} for key in NAMES[:257]}}
    ),
    "a reference of many steps": at_4_000_places({"$ref": "#/" + "a/" * 200_000}),
    "all of many required": an_object({key: {} for key in MANY}, required=MANY),
    "choices of choices of choices": choices_of_choices(400),
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "harmony"])
def test_tools_that_are_a_bomb_cost_the_prompt_thread_little(name: str, bomb: str) -> None:
    compiler, tools = constrainer_for(family(name)), [tool("f", BOMBS[bomb])]
    with within(MAKING_CALLS_MAX):
        compiler.call_drafts(Constraints(), tools)


def followed(name: str, schema: dict[str, Any], text: str) -> tuple[CallDrafts, GrammarCompiler]:
    """Return what has followed a call; no token of it takes long."""
    compiler = constrainer_for(family(name))
    drafts = compiler.call_drafts(Constraints(), [tool("f", schema)])
    assert drafts is not None
    tokens = family(name).tokenizer.encode(text, add_special_tokens=False)
    for at, token in enumerate(tokens):
        with within(STEP_CALLS_MAX):
            drafts.forced(8)
            drafts.fitting(tokens[at : at + 3], tokens[at + 3 : at + 8])
            drafts.choice(tokens[at : at + 3])
            drafts.take([token])
    return drafts, compiler


def test_a_name_of_many_thousand_characters_is_told_by_pieces() -> None:
    """Its tokens were remembered from each place on: 60,000 characters took 9 GB and 44 s."""
    name = "".join(random.Random(1).choices("abcdefgh ", k=60_000))
    schema = an_object({name: {"type": "string"}}, required=[name])
    drafts, compiler = followed("qwen3", schema, BEGIN + '"' + name[:300])
    told = family("qwen3").tokenizer.decode(drafts.forced(8))
    assert told and name[300:].startswith(told)
    texts = compiler._draft_texts.get("", "")
    assert texts is not None
    assert max(map(len, texts._tokens)) <= 2 * REST_BYTES_MAX


def test_names_that_are_spelt_alike_are_not_tried_in_all_orders() -> None:
    """Each of them is "?" in UTF-8: in any order there are 11! ways, and all end at the mark."""
    schema = an_object({chr(0xD800 + n): {"type": "integer"} for n in range(11)})
    text = BEGIN + ", ".join(['"?": 1'] * 9) + "!!"
    drafts, compiler = followed("qwen3", schema, text)
    assert not drafts.positions and not compiler.counts


@pytest.mark.parametrize("value", ['"' + "\\n" * 30_000 + '"', "[" + "[1]," * 15_000 + "1]"])
def test_a_long_call_is_read_again_in_few_steps(value: str) -> None:
    assert len(value) < CALL_BYTES_MAX
    schema = an_object({"b": {"type": "string"}, "a": {}})
    compiler = constrainer_for(family("qwen3"))
    drafts = compiler.call_drafts(Constraints(), [tool("f", schema)])
    assert drafts is not None
    encode = family("qwen3").tokenizer.encode
    drafts.take(encode(f'{BEGIN}"a": {value}', add_special_tokens=False))
    tokens = encode(', "b": "', add_special_tokens=False)
    with within(STEP_CALLS_MAX):
        drafts.take(tokens)
    assert drafts.positions


def test_text_that_must_come_is_told_up_to_a_bound() -> None:
    text, places = forced_text(start_positions(Literal(b"x" * 10_000)), 100)
    assert 100 <= len(text) <= 100 + REST_BYTES_MAX
    assert advance(places, b"x" * (10_000 - len(text)))[0] == (None,)
    assert STEPS_MAX > POSITIONS_MAX


@pytest.mark.parametrize("value", ["1", "true", "null", '"x"', "[1]", '{"a": "<"}'])
def test_a_value_of_any_kind_ends_where_its_tag_begins(value: str) -> None:
    """A bare word was read on through the tag, up to a blank, a comma or a bracket."""
    schema = an_object({"x": {"anyOf": [{"type": "object"}, {}]}}, required=["x"])
    head = "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>"
    drafts, compiler = followed("glm4", schema, f"{head}{value}<")
    assert family("glm4").tokenizer.decode(drafts.forced(8)).startswith("/arg_value")
    assert not compiler.counts
