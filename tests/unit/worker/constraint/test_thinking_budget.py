"""Checks when a spent budget closes a think block, and which tokens are forced then."""

import pytest

from hearth.worker.constraint.thinking_budget import ThinkingBudget, ThinkMarks, think_marks
from hearth.worker.stream.detokenise import Vocabulary
from scripts.harness.model_families import FAMILIES, family

OPEN, CLOSE, NEWLINE, CHANNEL, ANALYSIS, MESSAGE, END, OTHER = range(1, 9)
TEXTS = {
    OPEN: b"<think>",
    CLOSE: b"</think>",
    NEWLINE: b"\n",
    CHANNEL: b"<|channel|>",
    ANALYSIS: b"analysis",
    MESSAGE: b"<|message|>",
    END: b"<|end|>",
    OTHER: b"final",
}
MARKS = ThinkMarks("<think>", "</think>", (NEWLINE, CLOSE, NEWLINE))
CHANNELS = ThinkMarks(
    "<|channel|>analysis<|message|>", "<|end|>", (END, CHANNEL), ANALYSIS, b"<|channel|>"
)
HEADER = (CHANNEL, ANALYSIS, MESSAGE)


def clock(
    budget: int, is_open: bool = True, marks: ThinkMarks = MARKS, **texts: bytes
) -> ThinkingBudget:
    known = TEXTS | {int(name.removeprefix("t")): text for name, text in texts.items()}
    return ThinkingBudget(marks, budget, is_open, lambda token: known.get(token, b"x"))


def forced_from(clock: ThinkingBudget) -> list[int]:
    """Return what is forced from here on, each token taken."""
    found = []
    while (token := clock.forced) is not None:
        found.append(token)
        clock.see(token)
    return found


def test_a_block_that_the_prompt_opened_is_closed_after_its_budget() -> None:
    timer = clock(3)
    for _ in range(3):
        assert timer.forced is None
        timer.see(9)
    assert forced_from(timer) == [NEWLINE, CLOSE, NEWLINE]
    for _ in range(10):
        timer.see(9)
        assert timer.forced is None


def test_a_budget_of_nothing_closes_at_once() -> None:
    assert forced_from(clock(0)) == [NEWLINE, CLOSE, NEWLINE]


def test_a_block_that_closes_by_itself_is_left_alone() -> None:
    timer = clock(3)
    for token in (9, 9, CLOSE, 9, 9, 9, 9):
        timer.see(token)
        assert timer.forced is None


def test_a_block_that_closes_with_its_last_token_is_not_closed_again() -> None:
    timer = clock(2)
    timer.see(9)
    timer.see(CLOSE)
    assert timer.forced is None


def test_a_block_counts_from_where_the_model_opens_it() -> None:
    timer = clock(2, is_open=False)
    for token in (NEWLINE, OPEN, 9):
        timer.see(token)
        assert timer.forced is None
    timer.see(9)
    assert forced_from(timer) == [NEWLINE, CLOSE, NEWLINE]


def test_a_mark_amid_the_answer_is_a_quotation() -> None:
    timer = clock(0, is_open=False)
    for token in (9, OPEN, 9, 9):
        timer.see(token)
        assert timer.forced is None


def test_a_mark_may_be_spelled_in_pieces() -> None:
    timer = clock(1, is_open=False, t20=b"\n<th", t21=b"ink>\n")
    timer.see(20)
    timer.see(21)
    assert timer.forced is None
    timer.see(9)
    assert timer.forced == NEWLINE
    timer = clock(3, t20=b"</th", t21=b"ink>\n")
    for token in (20, 21, 9, 9, 9):
        timer.see(token)
        assert timer.forced is None


def test_a_block_does_not_end_within_a_character() -> None:
    timer = clock(2, t20=b"\xf0\x9f", t21=b"\x98\x80")
    timer.see(9)
    timer.see(20)
    assert timer.forced is None
    timer.see(21)
    assert timer.forced == NEWLINE


def test_a_character_that_never_ends_does_not_keep_the_block_open() -> None:
    timer = clock(1, t20=b"\xf0")
    for _ in range(4):
        assert timer.forced is None
        timer.see(20)
    assert timer.forced == NEWLINE


def test_thinking_on_a_channel_may_begin_again_until_the_budget_is_spent() -> None:
    timer = clock(3, is_open=False, marks=CHANNELS)
    for token in (*HEADER, 9, END, *HEADER):
        timer.see(token)
        assert (timer.forced, timer.banned) == (None, None)
    timer.see(9)
    assert forced_from(timer) == [END, CHANNEL]


def test_a_spent_budget_bans_the_channel_that_thinks() -> None:
    timer = clock(1, is_open=False, marks=CHANNELS)
    for token in (*HEADER, 9):
        timer.see(token)
    assert forced_from(timer) == [END, CHANNEL]
    assert timer.banned == ANALYSIS
    timer.see(OTHER)
    assert timer.banned is None
    timer.see(MESSAGE)
    assert timer.forced is None


@pytest.mark.parametrize(
    ("name", "text"),
    [("qwen3", "\n</think>\n\n"), ("qwen3_5", "\n</think>\n\n"), ("glm4", "</think>\n")],
)
def test_a_block_is_closed_as_the_template_closes_it(name: str, text: str) -> None:
    tokenizer = family(name).tokenizer
    marks = think_marks(tokenizer, None, family(name).reader.think_marks)
    assert marks is not None
    assert tokenizer.decode(list(marks.forced)) == text


def test_harmony_leaves_the_next_channel_to_the_model() -> None:
    tokenizer = family("harmony").tokenizer
    marks = think_marks(tokenizer, family("harmony").reader.messages, ("", ""))
    assert marks is not None and marks.again is not None
    assert tokenizer.decode(list(marks.forced)) == "<|end|><|start|>assistant<|channel|>"
    assert "analysis".startswith(tokenizer.decode([marks.again]))


@pytest.mark.parametrize("name", [name for name, each in FAMILIES.items() if each.thinks])
def test_forced_tokens_are_closing_ones(name: str) -> None:
    tokenizer, reader = family(name).tokenizer, family(name).reader
    marks = think_marks(tokenizer, reader.messages, reader.think_marks)
    assert marks is not None
    timer = ThinkingBudget(marks, 0, True, Vocabulary(tokenizer).token_bytes)
    assert forced_from(timer) == list(marks.forced)
    assert marks.end in tokenizer.decode(list(marks.forced))


def test_a_model_without_marks_does_not_think() -> None:
    assert think_marks(family("llama3").tokenizer, None, ("", "")) is None
