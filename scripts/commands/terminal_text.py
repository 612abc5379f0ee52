"""Makes text from a model, a hub or a client safe to show: a terminal obeys none of it."""

import unicodedata
from typing import Final

# They turn the order of what is read, so that a line shows as another one.
_TURNING: Final = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def shown(text: str) -> str:
    """Return `text` without control characters; lines and tabs stay."""
    if text.isprintable():
        return text
    return "".join(
        c
        for c in text
        if c in "\n\t" or not (c in _TURNING or unicodedata.category(c) in ("Cc", "Cs"))
    )


def shown_name(text: str, chars_max: int = 200) -> str:
    """Return a name in one line."""
    return shown(text[:chars_max]).replace("\n", " ").replace("\t", " ")


def plain(name: str) -> str:
    """Return a name on one line, with ? for what a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in name)


def plain_lines(text: object) -> str:
    return "\n".join(map(plain, str(text).split("\n")))
