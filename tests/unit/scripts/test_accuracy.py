"""Questions, answers and saved runs of hearth eval are read and compared rightly."""

import stat
from pathlib import Path
from typing import Any

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
from hearth.commands.accuracy.question_file import SHIPPED, Question, question_of, read_questions
from hearth.commands.accuracy.saved_answers import SavedRun, check_writable, save
from hearth.commands.server_client import ProbeError


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


ASKED = [{"role": "user", "content": "2 + 2?"}]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "q", "input": ASKED, "ideal": "4"},
        {"id": "q", "input": ASKED, "ideal": ["4"]},
        {"id": "q", "input": "2 + 2?", "answer": "4"},
        {"custom_id": "q", "body": {"messages": ASKED}, "ideal": "4"},
        {
            **{"custom_id": "q", "method": "POST", "url": "/v1/chat/completions"},
            **{"body": {"messages": ASKED}, "answer": ["4"]},
        },
        {"id": "q", "messages": [*ASKED, {"role": "assistant", "content": "4"}]},
        {"id": "q", "messages": ASKED, "ideal": "4"},
    ],
)
def test_every_shape_gives_the_same_question(row: dict[str, Any]) -> None:
    assert question_of(row, "line 1") == Question("q", {"messages": ASKED}, ("4",))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting property name"),
        ("[1]", "[1] is no question of one of the three shapes"),
        ('{"prompt": "x"}', '{"prompt": "x"} is no question'),
        ("{}", "is no question"),
        ('{"input": []}', "is no question"),
        ('{"messages": "x"}', "is no question"),
        ('{"messages": []}', "is no question"),
        ('{"input": [{"content": "x"}]}', "is no question"),
        ('{"body": {"input": "x"}}', "is no question"),
        ('{"body": "x"}', "is no question"),
        (
            '{"url": "/v1/embeddings", "body": {"messages": "x"}}',
            "only /v1/chat/completions is asked, and not /v1/embeddings",
        ),
        ('{"input": "x", "ideal": 1}', "is no question"),
        ('{"input": "x", "answer": [""]}', "is no question"),
        ('{"messages": [{"role": "user"}]}', "is no question"),
        (
            '{"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}',
            "is no question",
        ),
    ],
)
def test_a_wrong_line_is_told_with_its_number_and_its_value(
    line: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f'{{"input": "x"}}\n\n{line}\n')
    with pytest.raises(ProbeError) as caught:
        read_questions(path, 100)
    assert str(caught.value).startswith(f"{path}, line 3: ") and said in str(caught.value)


def test_the_answer_to_each_question_that_comes_with_hearth_stands_in_it() -> None:
    for each in read_questions(SHIPPED, 1000):
        assert is_right(each.body["messages"][-1]["content"], each.ideals, "includes"), each.id


REPLY = Reply("B é", "hm", ('read {"path": "a"}',), ((" B", -0.25), ("é", -3e-7)), 90, 80, "ssd")


def test_a_saved_run_is_the_owners_alone_also_over_an_open_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("x")
    path.chmod(0o644)
    check_writable(path)
    save(path, SavedRun({"q": "abc"}, {"cold": {"q": REPLY}, "warm": {}}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
