"""Schemas that are none, or that are small and mean something huge: a refusal, and soon."""

import itertools
from typing import Any

import pytest

from hearth.shared.errors import RequestError
from hearth.shared.wire_messages import Constraints
from hearth.worker.constraint.json_schemas import REPEATS_MAX, patterns_of, repeats
from hearth.worker.stream.tool_calls.request_tools import RequestTools
from scripts.harness.constrained_answers import constrainer_for, tool
from scripts.harness.model_families import family
from tests.helpers.worker.output_formats import reader

CALL = Constraints("required")


def test_choices_of_choices_are_not_followed_for_ever() -> None:
    names = [f"d{n}" for n in range(40)]
    defs: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{other}"}] * 2}
        for name, other in itertools.pairwise(names)
    }
    defs[names[-1]] = {"type": "string"}
    schema = {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs}
    assert not RequestTools([tool("f", schema)]).is_text("f", "a"), "2 ** 39 of them"


@pytest.mark.parametrize("marks", [("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>")])
def test_marks_that_only_the_reader_knows_are_the_grammars_too(marks: tuple[str, str]) -> None:
    base = family("qwen3")

    class Reader:
        think_marks, grammar = marks, None

        def is_thinking_open(self, opening: str) -> bool:
            return opening.endswith(marks[0])

    maker = constrainer_for(base, reader=Reader())
    assert maker.think_marks is not None
    assert (maker.think_marks.start, maker.think_marks.end) == marks


@pytest.mark.parametrize("fan", [3, 8])
def test_a_schema_that_holds_itself_many_times_is_refused(fan: int) -> None:
    node = {"type": "object", "properties": {f"p{n}": {"$ref": "#/$defs/n"} for n in range(fan)}}
    schema = {"$defs": {"n": node}, "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}}
    maker = constrainer_for(family("qwen3"), reader=reader("gemma4"))
    with pytest.raises(RequestError, match="rules"):
        maker.token_mask(CALL, [tool("f", schema)], "", 4)


# ---------------------------------------------------------------- bombs against llguidance


def pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


# Attack -> a value's schema that costs seconds, or fails at a later token, without a limit.
REFUSED: dict[str, dict[str, Any]] = {
    "repeats of repeats": pattern("(.{1,500}a){500}"),
    "repeats of repeats, whole": pattern("^((a{100}){100}){100}$"),
    "a count that no answer reaches": pattern("^(é){100000,}$"),
    "a name's pattern": {
        "type": "object",
        "patternProperties": {"(.{1,500}a){500}": {"type": "integer"}},
        "additionalProperties": False,
    },
    "names held to a pattern": {"type": "object", "propertyNames": pattern("(.{1,500}a){500}")},
    "multiples of a large number": {"type": "integer", "multipleOf": 999_983},
    "multiples in a large range": {
        "type": "integer",
        "minimum": 0,
        "maximum": 10**18,
        "multipleOf": 10**9 + 7,
    },
}
# Attack -> a value's schema that only looks as if it cost much.
TAKEN: dict[str, dict[str, Any]] = {
    "repeats that an answer need not reach": pattern("((a{100}){100}){100}"),
    "letters of any script": pattern(r"(\p{L}{1,50}x){1,50}"),
    "a long text": {"type": "string", "minLength": 10**7},
    "many items of many items": {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        "minItems": 10**6,
    },
    "a domain's name": pattern(r"^([a-z0-9-]{1,63}\.){1,127}[a-z]{2,63}$"),
    "base64": pattern("^([A-Za-z0-9+/]{4}){0,250000}$"),
}


def with_value(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": value}, "required": ["a"]}


# The others are of the same kinds.
BY_DAY = ("repeats of repeats", "a name's pattern", "multiples of a large number", "base64")


def by_day(attacks: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(name, marks=() if name in BY_DAY else pytest.mark.night) for name in attacks
    ]


@pytest.mark.parametrize("is_tool", [False, True])
@pytest.mark.parametrize("attack", by_day(REFUSED))
def test_a_schema_bomb_is_a_400_and_what_is_asked_next_is_served(
    attack: str, is_tool: bool
) -> None:
    """A token mask that is returned has passed its first step in a process of its own."""
    maker = constrainer_for(family("qwen3"))
    schema = with_value(REFUSED[attack])
    asked = CALL if is_tool else Constraints(is_json=True, schema=schema)
    with pytest.raises(RequestError) as caught:
        maker.token_mask(asked, [tool("f", schema)], "", 4)
    assert (caught.value.status, caught.value.code) == (400, "invalid_grammar")
    for each in patterns_of(schema):
        assert repr(each.pattern)[:40] in str(caught.value), "it names the pattern"
    assert maker.report()["refused"] == 1
    assert maker.token_mask(Constraints(is_json=True), [], "", 4) is not None


@pytest.mark.parametrize("attack", by_day(TAKEN))
def test_a_schema_that_only_looks_like_a_bomb_is_taken(attack: str) -> None:
    maker = constrainer_for(family("qwen3"))
    answer = Constraints(is_json=True, schema=with_value(TAKEN[attack]))
    assert maker.token_mask(answer, [], "", 4) is not None


# ---------------------------------------------------------------- repeats of patterns


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("", 1),
        ("abc*d+?", 1),
        ("a{7}", 7),
        ("a{2,7}", 7),
        ("a{7,}", 7),
        ("a{0}", 1),
        ("((a{100}){100}){100}", 1_000_000),
        ("(.{1,500}a){500}", 250_000),
        ("(a{3}|b{5})c{4}", 5),
        ("(a{3}b){2}|c{4}", 6),
        (r"(\(a{9}\)){2}", 18),
        ("[a{9}]{2}", 2),
        ("[^]{9}]{2}", 2),
        (r"\{9}a{2}", 2),
        ("(?:a{2}){3}", 6),
        ("a{b}{x,9}", 1),
        ("a{2}b{3}", 3),
        (")a{2}(", 2),
        ("(" * 5_000 + "a{2}", 2),
        ("(a{999999999999}){999999999999}", REPEATS_MAX),
        ("a{" + "9" * 10_000 + "}", 1),
    ],
)
def test_repeats_within_each_other_are_multiplied(pattern: str, count: int) -> None:
    assert repeats(pattern) == count


def test_patterns_are_found_wherever_a_schema_may_have_them() -> None:
    schema = {
        "pattern": "a",
        "properties": {"x/y": {"pattern": "b{2}"}, "pattern": {"type": "string"}},
        "patternProperties": {"c{3}": {"items": [{"pattern": "d"}]}},
        "propertyNames": {"pattern": "e"},
        "$defs": {"f": {"anyOf": [{"pattern": "f"}]}},
    }
    assert {each.pointer: (each.pattern, each.repeats) for each in patterns_of(schema)} == {
        "/pattern": ("a", 1),
        "/properties/x~1y/pattern": ("b{2}", 2),
        "/patternProperties/c{3}": ("c{3}", 3),
        "/patternProperties/c{3}/items/0/pattern": ("d", 1),
        "/propertyNames/pattern": ("e", 1),
        "/$defs/f/anyOf/0/pattern": ("f", 1),
    }
