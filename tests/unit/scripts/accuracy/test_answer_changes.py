"""Answers are graded and compared here: which changed, from which character on, by how much."""

import pytest
from hypothesis import given, strategies as st

from hearth.commands.accuracy.answer_changes import (
    Change,
    LogprobDifference,
    Reply,
    around,
    changes,
    first_difference,
    is_right,
    largest_logprob_difference,
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


def test_each_changed_answer_is_told_with_its_place() -> None:
    cold = {"a": Reply("same"), "b": Reply("it is 7731."), "c": Reply("x"), "d": Reply("only here")}
    warm = {"a": Reply("same"), "b": Reply("it is 7741."), "c": Reply("x y"), "e": Reply("there")}
    assert changes(cold, warm) == [
        Change("b", 8, "it is 7731.", "it is 7741."),
        Change("c", 1, "x", "x y"),
    ]


@pytest.mark.parametrize("field", ["content", "reasoning", "calls"])
def test_a_change_is_seen_wherever_the_model_wrote(field: str) -> None:
    said = {"content": "a", "reasoning": "b", "calls": ("c",)}
    other = {**said, field: ("d",) if field == "calls" else "d"}
    assert len(changes({"q": Reply(**said)}, {"q": Reply(**other)})) == 1  # type: ignore[arg-type]


def test_prompts_of_other_tokens_are_set_apart() -> None:
    before = {"a": Reply("", prompt_tokens=7), "b": Reply("", prompt_tokens=7), "c": Reply("")}
    after = {"a": Reply("", prompt_tokens=7), "b": Reply("", prompt_tokens=11)}
    assert with_other_prompts(before, after) == ["b"]


def scored(*scores: tuple[str, float]) -> dict[str, Reply]:
    return {"q": Reply("".join(token for token, _ in scores), logprobs=scores)}


def test_the_largest_difference_of_log_probabilities_is_told_with_its_token() -> None:
    before = scored((" a", -1.0), (" b", -0.5), (" c", -2.0))
    after = scored((" a", -1.25), (" b", -1.5), (" d", -9.0))
    found = largest_logprob_difference(before, after)
    assert found == LogprobDifference(1.0, "q", 1, " b"), "what follows another token is not it"
    assert largest_logprob_difference(before, before) == LogprobDifference(0.0, "q", 0, " a")
    assert largest_logprob_difference(before, {"q": Reply("")}) is None
    assert largest_logprob_difference(before, {}) is None


def test_a_difference_is_shown_on_one_line_with_what_stands_around() -> None:
    assert around("short", 2) == "short"
    text = "a long beginning\nthen THIS" + " and more" * 9
    assert around(text, 22) == "... beginning\\nthen THIS and more and more a..."
