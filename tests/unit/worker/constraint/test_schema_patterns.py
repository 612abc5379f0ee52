"""Checks how the repeats of a pattern are counted, and where a schema has patterns."""

import pytest

from hearth.worker.constraint.schema_patterns import REPEATS_MAX, patterns_of, repeats


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
    assert {each.place: (each.pattern, each.repeats) for each in patterns_of(schema)} == {
        "/pattern": ("a", 1),
        "/properties/x~1y/pattern": ("b{2}", 2),
        "/patternProperties/c{3}": ("c{3}", 3),
        "/patternProperties/c{3}/items/0/pattern": ("d", 1),
        "/propertyNames/pattern": ("e", 1),
        "/$defs/f/anyOf/0/pattern": ("f", 1),
    }
