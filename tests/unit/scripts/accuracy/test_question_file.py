"""Question files: every shape gives the same question, and a wrong line says what helps."""

from pathlib import Path
from typing import Any

import pytest

from hearth.commands.accuracy.answer_changes import is_right
from hearth.commands.accuracy.question_file import SHIPPED, Question, question_of, read_questions
from hearth.commands.server_client import ProbeError

ASKED = [{"role": "user", "content": "2 + 2?"}]
RIGHT = {"role": "assistant", "content": "4"}


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
        {"id": "q", "messages": [*ASKED, RIGHT]},
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
