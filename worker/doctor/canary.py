"""Makes the canary: a fixed conversation of five turns, in tokens of any model."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from hearth.worker.prompt.prefill_cuts import TurnMarks

TURNS: Final = 5
FIRST_SHARE: Final = 2  # the first turn has one part in so many: system, tools and a file
TURN_TOKENS_MIN: Final = 24

# Plain prose and code; numbered lines keep it from repeating itself.
_LINES: Final = (
    "The harbour master writes down each ship that comes in, its cargo and its captain.",
    "def total(rows): return sum(row.weight * row.count for row in rows if row.count > 0)",
    "On the third day the wind turned north, and two of the boats stayed behind the pier.",
    "Error: the file 'manifest.json' has 14 entries, and 12 were expected. Check lines 3 and 9.",
    "Who paid for the grain? The ledger says one thing, and the letter from the mill another.",
    'for name, place in sorted(ships.items()): print(f"{name:12} lies at {place}")',
    "Please list what is still missing, and say which of it can wait until next week.",
    "The lamp on the north tower burns oil; the one on the south tower was changed last year.",
)
_OTHER: Final = "Leave that. Tell me instead about the weather at the northern tower in winter."


@dataclass(frozen=True, slots=True)
class Canary:
    """The user's part of a conversation, and how long each answer is. Immutable."""

    turns: tuple[tuple[int, ...], ...]  # tokens between two answers, the assistant's header too
    other: tuple[int, ...]  # in place of a late turn: where the conversation forks
    answer_tokens: int

    @property
    def depth(self) -> int:
        """Tokens of the last prompt."""
        return sum(map(len, self.turns)) + (len(self.turns) - 1) * self.answer_tokens


def make_canary(tokenizer: Any, marks: TurnMarks, depth: int, answer_tokens: int) -> Canary:
    """Return a canary whose last prompt has some `depth` tokens."""
    text = _endless(tokenizer)
    said = max(TURN_TOKENS_MIN * TURNS, depth - (TURNS - 1) * answer_tokens)
    first = said // FIRST_SHARE
    lengths = [first] + [(said - first) // (TURNS - 1)] * (TURNS - 1)
    turns = tuple(_turn(tokenizer, marks, itertools.islice(text, n)) for n in lengths)
    other = _turn(tokenizer, marks, iter(_encoded(tokenizer, _OTHER)))
    return Canary(turns, other, answer_tokens)


def _turn(tokenizer: Any, marks: TurnMarks, said: Iterator[int]) -> tuple[int, ...]:
    """Return a user's message and the header of the answer, where the template has marks."""
    headers = marks.assistant_headers
    own = {header[0] for header in headers}
    opening = sorted(marks.header_ids - own)[:1] or sorted(own)[:1]
    answer = headers[0] if headers else tuple(_encoded(tokenizer, "\n\nAnswer: "))
    return (*opening, *_encoded(tokenizer, "user\n"), *said, *answer)


def _endless(tokenizer: Any) -> Iterator[int]:
    for number in itertools.count(1):
        yield from _encoded(tokenizer, f"{number}. {_LINES[number % len(_LINES)]}\n")


def _encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
