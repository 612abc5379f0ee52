"""Answers are graded and compared here: which changed, from which character on, by how much."""

import pytest
from hypothesis import given, strategies as st

from hearth.commands.accuracy.answer_changes import (
    Reply,
    changes,
    first_difference,
    is_right,
    right_count,
    with_other_prompts,
)


@pytest.mark.parametrize(
    ("content", "ideal", "match", "includes"),
    [
        ("B", "B", True, True),
        (" b.\n", "B", True, True),
        ("(B) Paris", "B", True, True),
        ("**B** because", "B", True, True),
        ("Because", "B", False, False),
        ("A or B", "B", False, True),
        ("The gate is 7731.", "7731", False, True),
        ("The gate is 77312.", "7731", False, False),
        ("It is in src/lib.py", "src/lib.py", False, True),
        ("(c) is it", "(c)", True, True),
        ("", "B", False, False),
        ("BB", "B", False, False),
        ("É", "é", True, True),
    ],
)
def test_an_answer_is_right_as_whole_words(
    content: str, ideal: str, match: bool, includes: bool
) -> None:
    assert is_right(content, ["no such", ideal], "match") is match
    assert is_right(content, ["no such", ideal], "includes") is includes


def test_only_what_has_a_right_answer_is_counted() -> None:
    replies = {"a": Reply("B"), "b": Reply("B"), "c": Reply("C")}
    assert right_count(replies, {"a": ("B",), "b": (), "c": ("B", "D")}, "match") == 1


@given(st.text(), st.text())
def test_the_first_difference_is_where_two_texts_part(one: str, other: str) -> None:
    at = first_difference(one, other)
    if at is None:
        assert one == other
    else:
        assert one[:at] == other[:at] and one[at : at + 1] != other[at : at + 1]


@pytest.mark.parametrize("field", ["content", "reasoning", "calls"])
def test_a_change_is_seen_wherever_the_model_wrote(field: str) -> None:
    said = {"content": "a", "reasoning": "b", "calls": ("c",)}
    other = {**said, field: ("d",) if field == "calls" else "d"}
    assert len(changes({"q": Reply(**said)}, {"q": Reply(**other)})) == 1  # type: ignore[arg-type]


def test_prompts_of_other_tokens_are_set_apart() -> None:
    before = {"a": Reply("", prompt_tokens=7), "b": Reply("", prompt_tokens=7), "c": Reply("")}
    after = {"a": Reply("", prompt_tokens=7), "b": Reply("", prompt_tokens=11)}
    assert with_other_prompts(before, after) == ["b"]
