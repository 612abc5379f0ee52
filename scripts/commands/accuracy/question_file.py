"""Reads question files in OpenAI's shapes, one JSON object a line.

Three shapes are taken, and one file may mix them:
  OpenAI evals   {"input": [messages] or "text", "ideal": "B" or ["B", "b"]}
  batch API      {"custom_id": "q1", "body": {"messages": [messages], ...}, "ideal": "B"}
  fine-tuning    {"messages": [messages, the last one the assistant's right answer]}
Any of them may have "id", and "answer" in place of "ideal". A question of the first two shapes
without either has no right answer: it is asked and compared, and not graded.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hearth.commands.server_client import CHAT, ProbeError, Row

SHIPPED: Final = Path(__file__).parent / "pocket_questions.jsonl"
SHAPES: Final = ("input", "messages", "body")
VALUE_CHARS_MAX: Final = 80  # of what an error quotes
LINE_CHARS_MAX: Final = 64 * 1024 * 1024  # what the server takes as one body


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `body` has `messages` and whatever else the file says of the request."""

    id: str
    body: Row
    ideals: tuple[str, ...] = ()  # the right answers; none where the file tells none


def read_questions(path: Path, count: int) -> list[Question]:
    """Return the first `count` questions of `path`.

    Raises:
        ProbeError: it cannot be read, or a line of it is no question.
    """
    questions: dict[str, Question] = {}
    for number, row in _rows(path):
        try:
            question = question_of(row, f"line {number}")
            if question.id in questions:
                raise ValueError(f"its id {question.id!r} is another line's; ids must differ")
        except ValueError as error:
            raise ProbeError(f"{path}, line {number}: {error}") from error
        questions[question.id] = question
        if len(questions) == count:
            break
    if not questions:
        raise ProbeError(f"{path} has no question; write one JSON object a line")
    return list(questions.values())


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield each line's number and JSON, blank lines left out."""
    try:
        with path.open(encoding="utf-8") as file:
            number = 0
            while line := file.readline(LINE_CHARS_MAX):
                number += 1
                if line.strip():
                    yield number, _parsed(path, number, line)
    except OSError as error:
        raise ProbeError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProbeError(f"{path} is not UTF-8 ({error.reason}); save it as UTF-8") from error


def _parsed(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProbeError(
            f"{path}, line {number}: {_shown(line.strip())} is no JSON ({error}); "
            "write one JSON object a line"
        ) from error


# ---------------------------------------------------------------- one line


def question_of(row: Any, name: str) -> Question:
    """Return the question that a line's JSON is, called `name` where it has no id.

    Raises:
        ValueError: it is none; the text says what is wrong and what helps.
    """
    if not isinstance(row, dict):
        raise ValueError(f"{_shown(row)} is no object; write one JSON object a line")
    found = [shape for shape in SHAPES if shape in row]
    if len(found) != 1:
        raise ValueError(
            f"its fields are {', '.join(row) or 'none'}; a question has one of "
            '"input" (OpenAI evals), "body" (batch API) and "messages"'
        )
    ideals = _ideals(row)
    if found == ["body"]:
        body = _batch_body(row)
    else:
        body = {"messages": _messages(row[found[0]], found[0])}
    if found == ["messages"] and not ideals:
        body["messages"], ideals = _answered(body["messages"])
    return Question(_id(row, name), body, ideals)


def _batch_body(row: Row) -> Row:
    body, url = row["body"], row.get("url", CHAT)
    if url != CHAT:
        raise ValueError(f'its "url" is {_shown(url)}; only {CHAT} is asked')
    if not isinstance(body, dict) or "messages" not in body:
        raise ValueError(f'its "body" is {_shown(body)}; write an object with "messages"')
    return {**body, "messages": _messages(body["messages"], "messages")}


def _messages(value: Any, field: str) -> list[Row]:
    if isinstance(value, str) and field == "input":
        return [{"role": "user", "content": value}]
    is_list = isinstance(value, list) and value
    if not is_list or not all(isinstance(each, dict) and "role" in each for each in value):
        raise ValueError(
            f'its "{field}" is {_shown(value)}; write a list of messages, '
            'as [{"role": "user", "content": "..."}]'
        )
    messages: list[Row] = value
    return messages


def _ideals(row: Row) -> tuple[str, ...]:
    field = "ideal" if "ideal" in row else "answer"
    value = row.get(field)
    ideals = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(ideals, list) or not all(isinstance(each, str) and each for each in ideals):
        raise ValueError(
            f'its "{field}" is {_shown(value)}; write the text of the right answer, '
            'as "B", or a list of such texts'
        )
    return tuple(ideals)


def _answered(messages: list[Row]) -> tuple[list[Row], tuple[str, ...]]:
    """Return the messages without the last one, and that one's text as the right answer."""
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last.get("content"), str) or len(messages) < 2:
        raise ValueError(
            f'its last message is {_shown(last)}; add "ideal", or end "messages" with the '
            "assistant's right answer"
        )
    return messages[:-1], (last["content"],)


def _id(row: Row, name: str) -> str:
    value = row.get("id", row.get("custom_id", name))
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise ValueError(f"its id is {_shown(value)}; write a text")
    return str(value)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return repr(text[:VALUE_CHARS_MAX]) + ("..." if len(text) > VALUE_CHARS_MAX else "")
