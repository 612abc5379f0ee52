"""Makes names that a hub or a folder told safe to show: a terminal obeys none of it."""

import re
from typing import Final

# Controls, what turns the order of reading, and half of a surrogate pair: a name that is no UTF-8.
_OBEYED: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(name: str) -> str:
    """Return a name in one line, with ? for what a terminal would obey."""
    return _OBEYED.sub("?", name)


def plain_lines(text: object) -> str:
    return "\n".join(map(plain, str(text).split("\n")))
