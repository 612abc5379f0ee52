"""Makes chat sessions of plain text, where a workload needs no captured one.

The same numbers make the same session, in each round and on each server.
"""

from collections.abc import Sequence
from typing import Any, Final

from hearth.commands.bench.workloads.filler import filler
from hearth.commands.replay.traces import CHAT_PATH, Captured

QUESTION_TOKENS: Final = 40
ANSWER_TOKENS: Final = 30

Content = str | list[dict[str, Any]]


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
        said = filler(ANSWER_TOKENS, f"{answers} answer {number} {turn}")
        messages = [*messages, {"role": "assistant", "content": said}]
    return rows


def made_session(
    workload: str, number: int, system_tokens: int, turns: int, salt: str
) -> list[Captured]:
    """Return session `number` of a workload; `salt` are its first words.

    It has a system prompt of about so many tokens, and `turns` questions.
    """
    system = salt + filler(system_tokens, f"{workload} {number}")
    questions = [filler(QUESTION_TOKENS, f"{workload} {number} {turn}") for turn in range(turns)]
    return chat_turns(workload, number, system, questions, workload)
