"""Checks when a spent budget closes a think block, and which tokens are forced then."""

from typing import Any

import pytest

from hearth.worker.constraint.token_mask import ThinkingBudget, ThinkMarks, think_marks
from hearth.worker.stream.detokenise import Vocabulary
from scripts.harness.model_families import family
from tests.helpers.cases import cases

TEXTS = [
    *("<think>", "</think>", "\n", "<|channel|>", "analysis", "<|message|>", "<|end|>", "final"),
    *("x", "\n<th", "</th", "ink>\n", "\xf0", "\xf0\x9f", "\x98\x80"),
]


def ids(*texts: str) -> tuple[int, ...]:
    return tuple(map(TEXTS.index, texts))


BLOCK = ThinkMarks("<think>", "</think>", ids("\n", "</think>", "\n"))
CHANNELS = ThinkMarks(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    ids("<|end|>", "<|channel|>"),
    *ids("analysis"),
    before_again=b"<|channel|>",
)


def forced_from(budget: ThinkingBudget) -> tuple[int, ...]:
    """Return what is forced from here on, each token taken."""
    found = []
    while (token := budget.forced) is not None:
        found.append(token)
        budget.add(token)
    return tuple(found)


@pytest.mark.parametrize("case", cases("constraint/thinking_budgets.yaml"))
def test_a_block_ends_once_its_budget_is_spent_and_not_before(case: dict[str, Any]) -> None:
    marks, is_open = CHANNELS if "channels" in case else BLOCK, case.get("is_open", True)
    budget = ThinkingBudget(
        marks, case["budget"], is_open, lambda token: TEXTS[token].encode("latin-1")
    )
    for token in ids(*case["says"]):
        assert (budget.forced, budget.banned) == (None, None)
        budget.add(token)
    assert forced_from(budget) == ids(*case.get("forced", ()))
    assert budget.banned == (TEXTS.index(case["banned"]) if "banned" in case else None)
    for token in ids(*case.get("then", ())):
        budget.add(token)
        assert (budget.forced, budget.banned) == (None, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "\n</think>\n\n"),
        ("qwen3_5", "\n</think>\n\n"),
        ("glm4", "</think>\n"),
        ("harmony", "<|end|><|start|>assistant<|channel|>"),  # the next one is the model's choice
    ],
)
def test_a_block_is_closed_as_the_template_closes_it(name: str, text: str) -> None:
    tokenizer, reader = family(name).tokenizer, family(name).reader
    marks = think_marks(tokenizer, reader.model_format.messages, reader.think_marks)
    assert marks is not None and (marks.again is not None) == (name == "harmony")
    budget = ThinkingBudget(marks, 0, True, Vocabulary(tokenizer).token_bytes)
    assert tokenizer.decode(list(forced_from(budget))) == text
    assert marks.again is None or "analysis".startswith(tokenizer.decode([marks.again]))


def test_a_model_without_marks_does_not_think() -> None:
    assert think_marks(family("llama3").tokenizer, None, ("", "")) is None
