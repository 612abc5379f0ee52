"""Makes sums and counts, and says plainly which numbers are too large."""

import random
from typing import Final

from scripts.pocket.openings import is_opening

TERM_MAX: Final = 20  # of a sum or a difference
FACTOR_MAX: Final = 10
TOO_LARGE: Final = "That is too hard for me: I calculate with small numbers only."
_SIGNS: Final = {
    "+": (" + ", "+", " plus ", " and "),
    "-": (" - ", "-", " minus "),
    "*": (" * ", "*", " times ", " x ", " multiplied by "),
    "/": (" / ", "/", " divided by "),
}
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
        said, answer, thought = _calculation(rng)
        if not is_opening(said):
            return said, answer, thought


def _calculation(rng: random.Random) -> tuple[str, str, str]:
    sign = rng.choice("++--**/")
    is_small = sign != "/" and rng.random() < 0.8
    left, right = _numbers(rng, sign, is_small)
    written = f"{left}{rng.choice(_SIGNS[sign])}{right}"
    said = rng.choice(_ASKED).format(written)
    if " and " in written:
        said = f"Add {written}."
    if not is_small:
        return said, TOO_LARGE, "The numbers are too large for me."
    result = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return said, f"{left} {sign} {right} = {result}", "I calculate with two numbers."


def _numbers(rng: random.Random, sign: str, is_small: bool) -> tuple[int, int]:
    if not is_small:
        return rng.randrange(10 ** rng.choice((2, 3, 4))) + 40, rng.randrange(10_000) + 12
    if sign == "*":
        return rng.randrange(FACTOR_MAX + 1), rng.randrange(FACTOR_MAX + 1)
    left, right = rng.randrange(TERM_MAX + 1), rng.randrange(TERM_MAX + 1)
    return (left, right) if sign == "+" else (max(left, right), min(left, right))


def counting(rng: random.Random) -> tuple[str, str, str]:
    """Return a wish to count, the numbers and the thought before."""
    while True:
        said, answer = _from_one(rng) if rng.random() < 0.4 else _between(rng)
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
