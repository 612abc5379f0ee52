"""Says in a client's words what llguidance's errors mean, and what to change."""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an error means for whoever wrote the schema. Immutable."""

    cause: str
    remedy: str = ""
    is_limit: bool = False  # the schema asks for more than can be followed
    is_of_patterns: bool = False  # it is a pattern that asks for it


_PATTERNS: Final = Meaning(
    "its patterns are too many or too complex together",
    "Let patterns repeat less",
    is_limit=True,
    is_of_patterns=True,
)
_CHOICES: Final = Meaning(
    "too many items in a row may come or be left out at one place",
    "Have fewer optional properties or alternatives there: make some required, or group them",
    is_limit=True,
)
_SIZE: Final = Meaning(
    "it has too many parts",
    "Have fewer properties, alternatives or values to choose from",
    is_limit=True,
)
_SEARCH: Final = Meaning(
    "its patterns, texts and numbers are too complex together",
    "Have a smaller multipleOf or range of numbers, or patterns that repeat less",
    is_limit=True,
    is_of_patterns=True,
)
_NOTHING: Final = Meaning(
    "no value is allowed: it holds itself without an end, or its parts exclude each other",
    "Let a $ref to itself be optional, or one of several alternatives",
)
_MEANINGS: Final = (
    (re.compile(r"items; max is|too many items", re.IGNORECASE), _CHOICES),
    (re.compile(r"too many (expressions|states)|LexerTooComplex", re.IGNORECASE), _PATTERNS),
    (re.compile(r"fuel|exhausted|CPU time", re.IGNORECASE), _SEARCH),
    (re.compile(r"too (big|large|complex)", re.IGNORECASE), _SIZE),
    (re.compile(r"NoExtension"), _NOTHING),
)
_ADVICE: Final = re.compile(r"; (consider making your grammar|try avoiding single-byte).*")


def meaning_of(said: str) -> Meaning:
    """Return what an error means; one that already says it is its own cause."""
    for words, meaning in _MEANINGS:
        if words.search(said):
            return meaning
    return Meaning(said)


def explained(error: Exception) -> str:
    """Return what an error means, its own words, and the remedy, without a stop at the end."""
    said = error_text(error)
    meaning = meaning_of(said)
    if meaning.cause == said:
        return said
    return f"{meaning.cause} ({said}). {meaning.remedy}"


def error_text(error: Exception) -> str:
    """Return the words of llguidance's error without its listing of our grammar.

    Its advice to whoever writes a grammar is left out too: a client writes a schema.
    """
    text = str(error).partition("<backtrace>")[0].partition("<non-verbose/>")[0]
    lines = filter(None, map(str.strip, text.splitlines()))
    kept = " ".join(line for line in lines if not re.match(r"\d+ \||\^", line))
    kept = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", kept)
    return _ADVICE.sub("", kept).rstrip(". ")
