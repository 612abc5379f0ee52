"""Makes chat sessions of common words, where a workload needs no captured one.

Common words are one token each for most tokenizers, so that a length in tokens is one in words. The
same numbers make the same session, in each round and on each server.
"""

import random
from collections.abc import Sequence
from typing import Any, Final

from hearth.commands.replay.traces import CHAT_PATH, Captured

_COMMON: Final = (
    "the and of to in is that it was for on are as with at be this have from or one had by but "
    "not what all were we when your can said there use an each which she do how their if will up "
    "other about out many then them these so some her would make like him into time has look two "
    "more write go see number no way could people my than first water been call who oil its now "
    "find long down day did get come made may part over new sound take only little work know "
    "place year live me back give most very after thing our just name good sentence man think say "
    "great where help through much before line right too mean old any same tell boy follow came"
)
WORDS: Final = tuple(_COMMON.split())
QUESTION_WORDS: Final = 40
ANSWER_WORDS: Final = 30
TURN_TOKENS: Final = QUESTION_WORDS + ANSWER_WORDS + 10  # that a turn adds, marks of roles included

Content = str | list[dict[str, Any]]


def words(seed: str, count: int) -> str:
    """Return `count` common words, always the same of one seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def chat_turns(
    name: str, number: int, system: str, questions: Sequence[Content], answers: str
) -> list[Captured]:
    """Return the requests of one session, a question each; made-up answers stand between them.

    `name` is that of the trace, `answers` seeds the made-up ones, `number` is of the session.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    rows = []
    for turn, question in enumerate(questions):
        messages = [*messages, {"role": "user", "content": question}]
        began_s = float(turn)
        body = {"messages": messages}
        trace = f"{name}-{number}"
        rows.append(Captured(trace, "chat", CHAT_PATH, {}, body, "", began_s, began_s + 0.5))
        said = words(f"{answers} {number} {turn}", ANSWER_WORDS)
        messages = [*messages, {"role": "assistant", "content": said}]
    return rows


def word_session(
    workload: str, number: int, system_words: int, turns: int, salt: str
) -> list[Captured]:
    """Return session `number` of a workload: so many words of a system prompt, `turns` questions.

    `salt` are its first words.
    """
    system = salt + words(f"{workload} {number}", system_words)
    questions = [words(f"{workload} {number} {turn}", QUESTION_WORDS) for turn in range(turns)]
    return chat_turns(workload, number, system, questions, workload)
