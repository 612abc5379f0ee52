"""References of every form, and keywords that no grammar can hold: what is accepted also holds.

An answer's schema is one grammar for every dialect; calls have one for each format of calls.
"""

import json
from typing import Any, Final

import pytest
from llguidance import LLMatcher, LLTokenizer

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint import grammar_build
from hearth.worker.constraint.grammar_compiler import GrammarCompiler
from hearth.worker.constraint.grammar_trial import GrammarEnded, GrammarError
from hearth.worker.constraint.lark_builder import GRAMMAR_CHARS_MAX, Lark
from scripts.harness.constrained_answers import constrainer_for, tool, walk
from scripts.harness.model_families import family
from tests.helpers.worker.output_formats import reader

pytestmark = pytest.mark.process

ANSWER: Final = "an answer"
WAYS: Final = (ANSWER, "qwen3", "qwen3_5", "glm4")  # or a call of that family
REQUIRED: Final = Constraints(tool_choice="required")
LOOKAHEAD: Final = r"^(?!\.)(?!.*\.\.)[A-Za-z0-9_.+-]+@([A-Za-z0-9-]+\.)+[A-Za-z]{2,}$"  # zod 4's


def compiler_of(way: str) -> GrammarCompiler:
    return constrainer_for(family("llama3" if way == ANSWER else way))


def written(way: str, value: dict[str, Any]) -> str:
    """Return the answer, or the call of the tool `f`, that gives `value`."""
    rows = [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in value.items()]
    if way == "qwen3_5":
        body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in rows)
        return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    if way == "glm4":
        pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
        return f"<tool_call>f\n{''.join(pair.format(*row) for row in rows)}</tool_call>"
    text = json.dumps(value, ensure_ascii=False)
    call = f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
    return text if way == ANSWER else call


def takes(made: GrammarCompiler, way: str, schema: Any, value: Any, others: Any = ()) -> bool:
    """Tell whether the schema lets `value` be written, as an answer or in a forced call."""
    is_answer = way == ANSWER
    asked = Constraints(is_json=True, schema=schema) if is_answer else REQUIRED
    started = walk(made, asked, [] if is_answer else [*others, tool("f", schema)])
    text = written(way, value)
    return started.takes(list(made.tokenizer.encode(text, add_special_tokens=False)))


def pair(target: Any, reference: str, name: str = "a", **more: Any) -> dict[str, Any]:
    """Return a schema whose `b`, which is required, is what a reference to a part leads to."""
    properties = {name: target, "b": {"$ref": reference}}
    closed = {"required": ["b"], "additionalProperties": False}
    return {"type": "object", "properties": properties} | closed | more


INTEGER: Final = {"type": "integer"}
ODD: Final = 'a/b~c%d e"ü'
NODE: Final = {
    "type": "object",
    "properties": {"n": INTEGER, "next": {"$ref": "#"}},
    "required": ["n"],
    "additionalProperties": False,
}
PART: Final = {"type": "object", "properties": {"b": INTEGER}, "additionalProperties": False}
ONE, WORD = {"b": 1}, {"b": "x"}
REFERENCES: Final[dict[str, tuple[Any, Any, Any]]] = {
    "a property": (pair(INTEGER, "#/properties/a"), ONE, WORD),
    "escapes": (pair(INTEGER, "#/properties/a~1b~0c%25d%20e%22%C3%BC", ODD), ONE, WORD),
    "bare blanks": (pair(INTEGER, '#/properties/a~1b~0c%25d e"ü', ODD), ONE, WORD),
    "a lone percent sign": (pair(INTEGER, "#/properties/50%", "50%"), ONE, WORD),
    "an empty name": (pair(INTEGER, "#/properties/", ""), ONE, WORD),
    "a property $ref": (pair(INTEGER, "#/properties/$ref", "$ref"), ONE, WORD),
    "a property const": (pair(INTEGER, "#/properties/const", "const"), ONE, WORD),
    "within a property const": (
        {"properties": {"b": INTEGER, "const": {"$ref": "#/properties/b"}}, "required": ["const"]},
        {"const": 1},
        {"const": "x"},
    ),
    "a property properties": (
        pair(PART, "#/properties/properties/properties/b", "properties"),
        ONE,
        WORD,
    ),
    "an index": (pair({"anyOf": [{"type": "null"}, INTEGER]}, "#/properties/a/anyOf/1"), ONE, WORD),
    "components": (
        pair({}, "#/components/schemas/T", components={"schemas": {"T": INTEGER}}),
        ONE,
        WORD,
    ),
    "the root": (NODE, {"n": 1, "next": {"n": 2}}, {"n": 1, "next": {"n": "x"}}),
    "one another": (
        pair(
            {"type": "object", "properties": {"b": {"$ref": "#/properties/b"}}},
            "#/$defs/B",
            **{"$defs": {"B": {"anyOf": [{"$ref": "#/properties/a"}, INTEGER]}}},
        ),
        {"b": {"b": {"b": 1}}},
        {"b": {"b": {"b": "x"}}},
    ),
    "the root's own $id": (
        pair(INTEGER, "#/properties/a") | {"$id": "https://example.com/s.json"},
        ONE,
        WORD,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_reference_to_anything_but_definitions_is_held_and_not_refused(way: str) -> None:
    made = compiler_of(way)
    for name, (schema, good, bad) in REFERENCES.items():
        assert takes(made, way, schema, good), name
        assert not takes(made, way, schema, bad), name


# ---------------------------------------------------------------- what no grammar can hold

MAIL: Final = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "to": {"type": "string", "format": "email", "pattern": LOOKAHEAD},
        "copies": {"type": "array", "items": {"type": "string", "pattern": LOOKAHEAD}},
        "urgency": {"type": "integer", "minimum": 0, "maximum": 3},
    },
    "required": ["to", "copies", "urgency"],
    "additionalProperties": False,
}
SENT: Final = {"to": "a@b.co", "copies": ["c@d.co"], "urgency": 2}
ITEMS: Final = {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}


def listing(**more: Any) -> dict[str, Any]:
    """Return a schema of the required `a`, a list of one or two integers, and what `more` says."""
    properties = {"a": ITEMS | more}
    return {"type": "object", "properties": properties, "required": ["a"]}


FAULTY: Final[dict[str, tuple[Any, Any, list[Any], str]]] = {  # good, bad, the place of the fault
    "zod's email": (
        MAIL,
        SENT,
        [SENT | {"urgency": 7}, SENT | {"copies": [1]}, {"to": "a@b.co"}, SENT | {"z": 1}],
        "at /properties/to: regex",
    ),
    "a lost reference": (
        listing(items={"anyOf": [{"$ref": "#/$defs/Lost"}, {"type": "null"}]}),
        {"a": [None]},
        [{"a": [None] * 3}, {"a": 5}],
        "at /properties/a/items/anyOf/0: Pointer '/$defs/Lost' does not exist",
    ),
    "an empty enum": (
        listing(items={"enum": [], "type": "integer"}),
        {"a": [4, 5]},
        [{"a": [4, 5, 6]}, {"a": ["x"]}],
        "at /properties/a/items: ",
    ),
    "a minimum above its maximum": (
        listing(items={"type": "integer", "minimum": 5, "maximum": 3}),
        {"a": [6]},
        [{"a": ["x"]}, {"a": [6, 6, 6]}],
        "at /properties/a/items: Unsatisfiable schema: minimum (5) is greater",
    ),
    "a type of Python": (
        listing(items={"type": "str"}),
        {"a": ["x"]},
        [{"a": ["x", "x", "x"]}],
        "at /properties/a/items: Invalid type: str",
    ),
}


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("fault", FAULTY)
def test_a_keyword_that_cannot_be_held_refuses_no_forced_call_and_the_rest_holds(
    way: str, fault: str
) -> None:
    """Also beside 39 sound tools."""
    schema, good, bad, _ = FAULTY[fault]
    made, others = compiler_of(way), [tool(f"t{n}", listing()) for n in range(39)]
    assert takes(made, way, schema, good, others)
    for value in bad:
        assert not takes(made, way, schema, value), value


@pytest.mark.parametrize("fault", FAULTY)
def test_a_keyword_that_cannot_be_held_of_an_answer_is_refused_with_its_place(fault: str) -> None:
    schema, good, _, place = FAULTY[fault]
    with pytest.raises(RequestError) as caught:
        takes(compiler_of(ANSWER), ANSWER, schema, good)
    assert (caught.value.status, caught.value.code) == (400, "invalid_grammar")
    assert f"The JSON schema of the answer {place}" in str(caught.value)


# ---------------------------------------------------------------- what got through the first mends

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

    def takes_call(value: str) -> bool:
        text = f"<|tool_call>call:f{{p:{value}}}<tool_call|>"
        started = walk(
            constrainer_for(base, reader=reader("gemma4")), REQUIRED, [tool("f", schema)]
        )
        return started.takes(list(base.tokenizer.encode(text, add_special_tokens=False)))

    assert takes_call("{a:1,b:2}")
    assert not takes_call("{a:1}")


# ---------------------------------------------------------------- bombs


def test_nothing_more_of_a_tools_schema_is_tried_once_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each part is written with all definitions: 20,000 of 1.2 MB took minutes."""
    asked = []

    def compiled(_: LLTokenizer, source: str) -> LLMatcher:
        asked.append(len(source))
        if len(asked) < 3:
            raise GrammarError("look-around is not supported")
        raise GrammarEnded("it takes too long")

    monkeypatch.setattr(grammar_build, "is_plain", lambda _: True)
    monkeypatch.setattr(grammar_build, "matcher_of", compiled)
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
