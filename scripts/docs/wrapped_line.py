"""Wraps what the generated pages of docs/ say, as wide as pages that somebody wrote."""

import textwrap
from typing import Final

WIDTH: Final = 120


def wrapped(line: str) -> str:
    """Return a paragraph or a list item as lines of WIDTH; an item's later ones are indented."""
    indent = "  " if line.startswith("- ") else ""
    lines = textwrap.wrap(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines) + "\n"
