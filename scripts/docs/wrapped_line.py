"""Wraps what the generated pages of docs/ say, as wide as pages that somebody wrote."""

import textwrap


def wrapped(line: str) -> str:
    """Return a paragraph or list item as lines of 120; an item's later ones are indented."""
    lines = textwrap.wrap(
        line,
        width=120,
        subsequent_indent="  " if line.startswith("- ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines) + "\n"
