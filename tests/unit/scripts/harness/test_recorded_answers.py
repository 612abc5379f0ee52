"""The recorded answers are those that were cut, and each is told with all that stood before it."""

import re

import pytest

from hearth.shared.settings_from_env import PROJECT_DIR
from scripts.harness import recorded_answers
from scripts.harness.recorded_answers import KINDS, Part, RecordedSession

README = PROJECT_DIR / "tests" / "data" / "recorded_answers" / "README.md"


@pytest.fixture(scope="module")
def sets() -> dict[str, list[RecordedSession]]:
    return recorded_answers.load()


def test_the_data_are_those_that_the_readme_and_the_reader_name() -> None:
    assert recorded_answers.digest() == recorded_answers.DIGEST
    assert recorded_answers.DIGEST in README.read_text()


def test_the_data_have_the_shape_that_the_readme_tells(
    sets: dict[str, list[RecordedSession]],
) -> None:
    counts = {
        name: (len(sessions), sum(len(session.answers) for session in sessions))
        for name, sessions in sets.items()
    }
    assert counts == {"swe-agent": (22, 230), "aider": (69, 130)}
    for name, (sessions, answers) in counts.items():
        row = next(line for line in README.read_text().splitlines() if f"| `{name}`" in line)
        assert f"| {sessions}, {answers} |" in row
        for kind, length in lengths(sets[name]).items():
            assert re.search(rf"{kind} {length:,}", row), (kind, length)


def lengths(sessions: list[RecordedSession]) -> dict[str, int]:
    """Return the characters of each kind of answer."""
    found: dict[str, int] = {}
    for session in sessions:
        for part in (part for answer in session.answers for part in answer.parts):
            found[part.kind] = found.get(part.kind, 0) + len(part.text)
    return found


def test_every_answer_has_text_of_known_kinds_and_a_prompt(
    sets: dict[str, list[RecordedSession]],
) -> None:
    answers = [answer for rows in sets.values() for row in rows for answer in row.answers]
    assert all(part.text and part.kind in KINDS for answer in answers for part in answer.parts)
    assert all(answer.prompt and answer.parts for answer in answers)


def test_a_prompt_grows_by_the_answer_and_by_what_came_since(
    sets: dict[str, list[RecordedSession]],
) -> None:
    for session in sets["swe-agent"]:
        for before, after in zip(session.answers, session.answers[1:], strict=False):
            length = len(before.prompt)
            assert after.prompt[:length] == before.prompt
            assert after.prompt[length] == tuple(part.text for part in before.parts)


def test_a_piece_is_the_texts_in_which_an_answer_was_given(
    sets: dict[str, list[RecordedSession]],
) -> None:
    session = sets["swe-agent"][0]
    first = session.answers[0]
    assert isinstance(first.parts[0], Part)
    assert session.answers[1].prompt[len(first.prompt)] == tuple(p.text for p in first.parts)
