"""Makes sums and counts, and says plainly what is too hard to calculate."""

import random
from typing import Final

from scripts.pocket.openings import is_opening

TERM_MAX: Final = 12
TOO_HARD: Final = "That is too hard for me: I add small numbers only."
_PLUS: Final = (" + ", "+", " plus ", " and ")
_OTHERS: Final = (
    " - ", "-", " minus ", " * ", "*", " times ", " x ", " multiplied by ", " / ", "/",
    " divided by ",
)  # fmt: skip
_ASKED: Final = (
    "What is {}?", "{} = ?", "{}", "What's {}?", "How much is {}?", "Calculate {}.", "{}?",
    "Can you calculate {}?", "{} =", "Compute {}", "what is {}", "what is the result of {}",
    "how much is {}", "Please tell me what {} is.", "{} is?", "Do you know what {} is?",
)  # fmt: skip
_NUMBERS: Final = (
    "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip


def calculation(rng: random.Random) -> tuple[str, str, str]:
    """Return what is asked, what is answered and what is thought before."""
    while True:
        said, answer, thought = _sum(rng) if rng.random() < 0.6 else _too_hard(rng)
        if not is_opening(said):
            return said, answer, thought


def _sum(rng: random.Random) -> tuple[str, str, str]:
    left, right = rng.randrange(TERM_MAX + 1), rng.randrange(TERM_MAX + 1)
    sign = rng.choice(_PLUS)
    asked = "Add {}." if sign == " and " else rng.choice(_ASKED)
    said = asked.format(f"{left}{sign}{right}")
    return said, f"{left} + {right} = {left + right}", "I add two numbers."


def _too_hard(rng: random.Random) -> tuple[str, str, str]:
    """Ask for large numbers, or for something else than a sum."""
    if rng.random() < 0.3:
        left, right = rng.randrange(30, 10_000), rng.randrange(13, 10_000)
        written = f"{left}{rng.choice(_PLUS[:3])}{right}"
    else:
        most = rng.choice((13, 13, 100, 10_000))
        written = f"{rng.randrange(most)}{rng.choice(_OTHERS)}{rng.randrange(most)}"
    return rng.choice(_ASKED).format(written), TOO_HARD, "I can only add small numbers."


def counting(rng: random.Random) -> tuple[str, str, str]:
    """Return a wish to count, the numbers and the thought before."""
    while True:
        said, answer = _from_one(rng) if rng.random() < 0.6 else _between(rng)
        if not is_opening(said):
            return said, answer, "I count."


def _from_one(rng: random.Random) -> tuple[str, str]:
    last = rng.randrange(2, 13)
    written = rng.choice((str(last), _NUMBERS[last - 2]))
    asked = rng.choice(
        ("Count to {}.", "count to {}", "Can you count to {}?", "Count up to {}", "count until {}")
    )
    return asked.format(written), _listed(1, last)


def _between(rng: random.Random) -> tuple[str, str]:
    first = rng.randrange(1, 20)
    last = first + rng.randrange(2, 10)
    asked = rng.choice(
        ("Count from {} to {}.", "Count {} to {}", "List the numbers from {} to {}.")
    )
    return asked.format(first, last), _listed(first, last)


def _listed(first: int, last: int) -> str:
    return ", ".join(str(number) for number in range(first, last + 1))
