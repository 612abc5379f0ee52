"""Grades answers and compares those of two runs: plain functions, no server."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

BEFORE_CHARS: Final = 16  # of an answer, shown before the first difference
BEHIND_CHARS: Final = 24
MARKUP: Final = "*_`\"'([{"  # that models put before a letter
GRADES: Final = ("match", "includes")


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, and what of its prompt was cached."""

    content: str
    reasoning: str = ""
    calls: tuple[str, ...] = ()  # each as its name and arguments
    logprobs: tuple[tuple[str, float], ...] = ()  # each sampled token's text, and how likely
    prompt_tokens: int = 0
    cached_tokens: int = 0
    source: str = "none"

    @property
    def text(self) -> str:
        """All that the model wrote."""
        return "\n".join(part for part in (self.reasoning, self.content, *self.calls) if part)


Replies = Mapping[str, Reply]  # by the question's id


@dataclass(frozen=True, slots=True)
class Change:
    """Two answers to one question that differ, from character `at` on."""

    question: str
    at: int
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class LogprobDifference:
    """The largest difference of a token's log probability, and where it is."""

    difference: float
    question: str
    place: int  # of the token in the answer
    token: str


# ---------------------------------------------------------------- grading


def is_right(content: str, ideals: Sequence[str], grade: str) -> bool:
    """Say whether `content` gives one of `ideals`, whatever their case.

    `match`: it begins with it, markup left out ("B", "(B)", "**B** because"). `includes`: it has
    it anywhere. Neither takes a part of a word: "Because" is not "B".
    """
    said = content.strip().casefold()
    return any(_has(said, ideal.strip().casefold(), grade) for ideal in ideals)


def _has(said: str, ideal: str, grade: str) -> bool:
    found = re.compile(rf"(?<!\w){re.escape(ideal)}(?!\w)")
    if grade == "includes":
        return found.search(said) is not None
    bare = said.lstrip(MARKUP)
    return bool(found.match(said) or found.match(bare))


def right_count(replies: Replies, ideals: Mapping[str, Sequence[str]], grade: str) -> int:
    """Return how many of the answers to graded questions are right."""
    return sum(
        is_right(reply.content, ideals[each], grade)
        for each, reply in replies.items()
        if ideals.get(each)
    )


# ---------------------------------------------------------------- comparing


def first_difference(one: str, other: str) -> int | None:
    """Return where two texts begin to differ; None where they do not."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def with_other_prompts(before: Replies, after: Replies) -> list[str]:
    """Return the questions of both whose prompts differ in tokens: their answers may, rightly.

    The server puts a turn that it sampled itself back as it was sampled, and a cold prompt is
    rendered from text.
    """
    return [
        each
        for each in before
        if each in after and before[each].prompt_tokens != after[each].prompt_tokens
    ]


def changes(before: Replies, after: Replies) -> list[Change]:
    """Return the answers that differ, of the questions that both have."""
    found = []
    for each in before:
        if each in after:
            one, other = before[each].text, after[each].text
            at = first_difference(one, other)
            if at is not None:
                found.append(Change(each, at, one, other))
    return found


def largest_logprob_difference(before: Replies, after: Replies) -> LogprobDifference | None:
    """Return the largest difference of log probabilities; None where there are none to compare.

    An answer is compared up to its first other token: what follows has another prefix.
    """
    largest: LogprobDifference | None = None
    for each in before:
        if each not in after:
            continue
        pairs = zip(before[each].logprobs, after[each].logprobs, strict=False)
        for place, ((token, one), (other_token, other)) in enumerate(pairs):
            if token != other_token:
                break
            difference = abs(one - other)
            if largest is None or difference > largest.difference:
                largest = LogprobDifference(difference, each, place, token)
    return largest


def around(text: str, at: int) -> str:
    """Return what of `text` is told of a difference at `at`, on one line."""
    start = max(0, at - BEFORE_CHARS)
    shown = text[start : at + BEHIND_CHARS]
    more = "..." if at + BEHIND_CHARS < len(text) else ""
    return ("..." if start else "") + repr(shown)[1:-1] + more
