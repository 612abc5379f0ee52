"""Schemas that got through the first mends: each test is named after its fault."""

import gc
import threading
from typing import Any, Final

import pytest
from mlx_lm.tool_parsers import gemma4

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint import grammar_client
from hearth.worker.constraint.grammar_client import GrammarEnded, GrammarError, GrammarProcess
from hearth.worker.constraint.lark_builder import GRAMMAR_CHARS_MAX, Lark
from scripts.harness.constrained_answers import constrainer_for, tool, walk, with_parser
from scripts.harness.model_families import family
from tests.unit.worker.constraint.test_references_are_held import (
    INTEGER,
    LOOKAHEAD,
    ONE,
    REQUIRED,
    WAYS,
    WORD,
    compiler_of,
    pair,
    takes,
)

pytestmark = pytest.mark.process

TREE: Final = {
    "$id": "https://example.com/tree",
    "type": "object",
    "properties": {"n": INTEGER, "nodes": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["n", "nodes"],
    "additionalProperties": False,
}
TYPEBOX: Final = TREE | {
    "$id": "T0",
    "properties": {"n": INTEGER, "nodes": {"type": "array", "items": {"$ref": "T0"}}},
}
LEAF: Final = {"n": 1, "nodes": []}
OLD: Final = {
    "$schema": "http://json-schema.org/draft-04/schema#",
    "type": "object",
    "properties": {
        "p": {
            "id": "https://example.com/q",
            "type": "object",
            "properties": {"n": {"$ref": "#/properties/m"}, "m": INTEGER},
            "additionalProperties": False,
        },
        "m": {"type": "string"},
    },
    "required": ["p"],
    "additionalProperties": False,
}
SCHEMAS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "a root with an $id refers to itself": (
        TREE,
        {"n": 1, "nodes": [LEAF]},
        {"n": 1, "nodes": [{"n": "x", "nodes": []}]},
    ),
    "TypeBox's recursion by its $id": (
        TYPEBOX,
        {"n": 1, "nodes": [LEAF]},
        {"n": 1, "nodes": [{"n": "x", "nodes": []}]},
    ),
    "draft 4's id is a base": (OLD, {"p": {"n": 1}}, {"p": {"n": "x"}}),
    "definitions are no object": (pair(INTEGER, "#/properties/a", **{"$defs": [{}]}), ONE, WORD),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fault", SCHEMAS)
def test_what_resolves_in_the_whole_document_is_held(way: str, fault: str) -> None:
    schema, good, bad = SCHEMAS[fault]
    made = compiler_of(way)
    assert takes(made, way, schema, good)
    assert not takes(made, way, schema, bad)


NARROWED: Final[dict[str, tuple[Any, Any]]] = {
    "a key that no grammar holds, with no others": (
        {
            "additionalProperties": False,
            "type": "object",
            "patternProperties": {LOOKAHEAD: INTEGER, "^y": INTEGER},
        },
        {"a@b.co": 1, "ya": 2},
    ),
    "a property that is no schema": (
        {
            "additionalProperties": False,
            "properties": {"a": "string", "b": INTEGER},
            "required": ["a", "b"],
            "type": "object",
        },
        {"a": "x", "b": 1},
    ),
}


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("fault", NARROWED)
def test_what_is_left_out_of_a_grammar_forbids_nothing_that_was_allowed(
    way: str, fault: str
) -> None:
    part, good = NARROWED[fault]
    schema = {"type": "object", "properties": {"m": part}, "required": ["m"]}
    assert takes(compiler_of(way), way, schema, {"m": good})


def test_a_property_that_is_no_schema_does_not_free_the_others() -> None:
    schema = {"type": "object", "properties": {"a": None, "b": INTEGER}, "required": ["b"]}
    assert not takes(compiler_of("qwen3"), "qwen3", schema, WORD)


def test_gemmas_parts_of_an_all_of_hide_no_required_property() -> None:
    objects = [
        {"type": "object", "properties": {name: INTEGER}, "required": [name]} for name in "ab"
    ]
    schema = {"type": "object", "properties": {"p": {"allOf": objects}}, "required": ["p"]}
    base = family("gemma3")
    tokenizer = with_parser(base, gemma4)

    def takes_call(value: str) -> bool:
        text = f"<|tool_call>call:f{{p:{value}}}<tool_call|>"
        started = walk(constrainer_for(base, tokenizer), REQUIRED, [tool("f", schema)])
        return started.takes(list(tokenizer.encode(text, add_special_tokens=False)))

    assert takes_call("{a:1,b:2}")
    assert not takes_call("{a:1}")


# ---------------------------------------------------------------- bombs


def test_nothing_more_of_a_tools_schema_is_tried_once_its_process_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part is written with all definitions: 20,000 of 1.2 MB took minutes."""
    asked = []

    def compiled(process: GrammarProcess, source: str) -> bytes:
        asked.append(len(source))
        if len(asked) < 3:
            raise GrammarError("look-around is not supported")
        process.close()
        raise GrammarEnded("it takes too long")

    monkeypatch.setattr(GrammarProcess, "compile", compiled)
    schema = {"type": "object", "properties": {f"p{n}": INTEGER for n in range(500)}}
    with pytest.raises(RequestError):
        compiler_of("llama3").token_mask(REQUIRED, [tool("f", schema)], "", 0)
    assert len(asked) < 20


def test_a_tools_schema_above_the_limit_is_refused_before_parts_are_tried() -> None:
    bad = {"m": {"type": "array", "items": {"type": "string", "pattern": LOOKAHEAD}}}
    schema = {"type": "object", "properties": bad, "description": "x" * 1_100_000}
    with pytest.raises(RequestError, match="the limit is 1,000,000"):
        compiler_of("llama3").token_mask(REQUIRED, [tool("f", schema)], "", 0)


def test_a_grammar_above_its_limit_is_not_written_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """47 KB of references to the root were 134 MB of grammar, and then a 400."""
    written = [0]
    rule = Lark.rule

    def counted(lark: Lark, body: str, options: str = "") -> Any:
        written[0] += len(body)
        return rule(lark, body, options)

    monkeypatch.setattr(Lark, "rule", counted)
    properties = {f"p{n}": {"$ref": "#"} for n in range(400)}
    schema = {"type": "object", "properties": properties, "description": "x" * 20_000}
    with pytest.raises(RequestError):
        compiler_of("qwen3_5").token_mask(REQUIRED, [tool("f", schema)], "", 0)
    assert written[0] < 2 * GRAMMAR_CHARS_MAX


# ---------------------------------------------------------------- ends


def test_emptying_the_cache_as_the_first_grammar_starts_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The base had no fork yet, and was ended under the thread that was forking it."""
    gc.collect()  # of earlier tests, whose processes are forks of the base
    grammar_client.end_base()
    made, fork, enders = compiler_of("llama3"), GrammarProcess.fork, list[threading.Thread]()

    def forked(process: GrammarProcess, wait_s: float | None = None) -> GrammarProcess:
        enders.append(threading.Thread(target=made.end_idle, args=(0.0,)))
        enders[-1].start()
        enders[-1].join(0.3)  # one that waits for the fork is right too
        return fork(process, wait_s)

    monkeypatch.setattr(GrammarProcess, "fork", forked)
    asked = Constraints(is_json=True, schema={"const": "x"})
    assert made.token_mask(asked, [], "", 0) is not None
    for ender in enders:
        ender.join()
