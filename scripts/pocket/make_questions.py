"""Writes the question file that comes with `hearth eval`: short questions about made-up notes.

    .venv/bin/python -m scripts.pocket.make_questions

Each talk is a trunk that its questions share, as the examples of a benchmark are: notes with facts
in them, and some questions with their answers. Half of the questions stand right behind it, half
behind a history that grows from one to the next. The names and values are made up, so that what is
right stands in the notes alone, and any model can be asked.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any, Final

from scripts.pocket import vocabulary as words
from scripts.pocket.conversations import today
from scripts.pocket.facts import Fact, corrected, document, fact

PAGE: Final = Path(__file__).parents[1] / "commands" / "accuracy" / "pocket_questions.jsonl"
SEED: Final = 2_000_003  # apart from those of the training and of the evaluation
TALKS: Final = 4
QUESTIONS: Final = 25  # of a talk
ALONE: Final = 13  # of them, right behind the trunk
CORRECTED: Final = 4  # one fact of so many in a history
SHOTS: Final = 5  # examples in a trunk
SENTENCES: Final = 6  # between the facts
VALUE_CHARS_MIN: Final = 3  # shorter ones stand in answers by chance

Message = dict[str, str]


def rows() -> list[dict[str, Any]]:
    """Return the file's questions, in order."""
    return [
        row for number in range(TALKS) for row in talk(random.Random(f"{SEED} {number}"), number)
    ]


def talk(rng: random.Random, number: int) -> list[dict[str, Any]]:
    """Return the questions of one trunk."""
    facts = different(rng, SHOTS + ALONE)
    trunk = notes(rng, facts)
    asked = [([*trunk, said("user", one.question)], one) for one in facts[SHOTS:]]
    asked += histories(rng, trunk, facts)
    return [
        {"id": f"notes{number + 1}-{place:02}", "input": messages, "ideal": one.value}
        for place, (messages, one) in enumerate(asked, start=1)
    ]


def notes(rng: random.Random, facts: list[Fact]) -> list[Message]:
    """Return the trunk: notes that say `facts`, of which the first are the examples."""
    date = today(words.date(rng), rng).statement
    text = document(rng, SENTENCES, rng.sample(facts, len(facts)), lined=True)
    trunk = [said("system", f"You are Pocket. {date}"), said("user", f"Some notes:\n{text}")]
    trunk.append(said("assistant", "I have read it. What do you want to know?"))
    for one in facts[:SHOTS]:
        trunk += pair(one)
    return trunk


def histories(
    rng: random.Random, trunk: list[Message], facts: list[Fact]
) -> list[tuple[list[Message], Fact]]:
    """Return questions behind a history that grows from one to the next.

    The history goes on with examples, which the model is asked nowhere: a turn that it answered
    itself would be put back as it was sampled, which may be other tokens than a cold prompt's.
    """
    found, before = [], list(trunk)
    now = {one.key: one for one in facts}
    for place, key in enumerate(rng.sample(list(now), QUESTIONS - ALONE)):
        if place % CORRECTED == CORRECTED - 1:
            now[key] = corrected(rng, now[key])
            before.append(said("user", now[key].statement))
            before.append(said("assistant", f"I will remember: {now[key].answer}"))
        found.append(([*before, said("user", now[key].question)], now[key]))
        before += pair(now[rng.choice([each.key for each in facts[:SHOTS] if each.key != key])])
    return found


def different(rng: random.Random, count: int) -> list[Fact]:
    """Return facts of which no two are about one thing, and no value is part of another's."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        one = fact(rng, held_out=True)
        others = [each.value for each in found.values()]
        is_own = not any(one.value in each or each in one.value for each in others)
        if is_own and one.value in one.statement and len(one.value) >= VALUE_CHARS_MIN:
            found.setdefault(one.key, one)
    return list(found.values())


def pair(one: Fact) -> list[Message]:
    return [said("user", one.question), said("assistant", one.answer)]


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def text() -> str:
    """Return the file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows())


def main() -> int:
    PAGE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
