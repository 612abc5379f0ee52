"""Reads question files in OpenAI's shapes, one JSON object a line.

Three shapes are taken, and one file may mix them:
  OpenAI evals   {"input": [messages] or "text", "ideal": "B" or ["B", "b"]}
  batch API      {"custom_id": "q1", "body": {"messages": [messages], ...}, "ideal": "B"}
  fine-tuning    {"messages": [messages, the last one the assistant's right answer]}
Any of them may have "id", and "answer" in place of "ideal". A question of the first two shapes
without either has no right answer: it is asked and compared, and not graded.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hearth.commands.server_client import CHAT, ProbeError, Row

SHIPPED: Final = Path(__file__).parent / "questions.jsonl"
SHOWN_CHARS_MAX: Final = 80  # of a line that is no question


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
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and len(questions) < count:
                    question = question_of(json.loads(line), f"line {number}")
                    if question.id in questions:
                        raise ValueError(f"its id {question.id!r} is another line's; ids differ")
                    questions[question.id] = question
    except OSError as error:
        raise ProbeError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProbeError(f"{path} is not UTF-8 ({error.reason}); save it as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ProbeError(f"{path}, line {number}: {error}; write one JSON object a line") from error
    if not questions:
        raise ProbeError(f"{path} has no question; write one JSON object a line")
    return list(questions.values())


def question_of(row: Any, name: str) -> Question:
    """Return the question that a line's JSON is, called `name` where it has no id.

    Raises:
        ValueError: it is none.
    """
    try:
        body = dict(row["body"]) if "body" in row else {"messages": row.get("messages")}
        messages = row.get("input") or body["messages"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        ideals = row.get("ideal", row.get("answer")) or ()
        if "messages" in row and not ideals:
            *messages, last = messages
            ideals = last["content"] if last["role"] == "assistant" else ("",)
        ideals = (ideals,) if isinstance(ideals, str) else tuple(ideals)
        is_one = messages and all("role" in each for each in messages)
        if not is_one or not all(isinstance(each, str) and each for each in ideals):
            raise TypeError
    except (AttributeError, LookupError, TypeError, ValueError):
        shown = json.dumps(row, ensure_ascii=False)[:SHOWN_CHARS_MAX]
        raise ValueError(f"{shown} is no question of one of the three shapes") from None
    if row.get("url", CHAT) != CHAT:
        raise ValueError(f"only {CHAT} is asked, and not {row['url']}")
    return Question(
        str(row.get("id", row.get("custom_id", name))), {**body, "messages": messages}, ideals
    )
