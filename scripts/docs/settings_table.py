"""Writes .env.example, and the lists of docs/settings.md: settings, dropped names.

    .venv/bin/python -m scripts.docs.settings_table

Both come from the tables of `hearth.shared`. The text around the lists stays as it is. Tests hold
both files equal to what this writes.
"""

import dataclasses
import re
from typing import Final

from hearth.shared.dropped_settings import DROPPED
from hearth.shared.paths import PROJECT_DIR
from hearth.shared.settings import Settings
from scripts.docs.wrapped_line import wrapped

PAGE: Final = PROJECT_DIR / "docs" / "settings.md"
MARKED: Final = re.compile(r"(<!-- (\w+): begin, .*? -->\n).*?(?=<!-- \2: end -->\n)", re.DOTALL)


def example_lines() -> list[str]:
    """Return what `.env.example` holds: each variable's line of explanation, then its default."""
    lines = []
    for row in dataclasses.fields(Settings):
        lines += [f"# {row.metadata['about']}", f"{row.metadata['name']}={row.metadata['default']}"]
    return lines


def settings_list() -> str:
    """Return the settings as a Markdown list, in the order of `.env.example`."""
    rows, lines = [], example_lines()
    for about, setting in zip(lines[::2], lines[1::2], strict=True):
        name, default = setting.split("=", 1)
        shown = f"`{default}`" if default else "empty"
        rows.append(wrapped(f"- `{name}` ({shown}): {about.removeprefix('# ')}"))
    return "".join(rows)


def with_lists(text: str) -> str:
    """Return the page's text with both lists between their marks written anew."""
    lists = {
        "settings": settings_list(),
        "dropped": wrapped(", ".join(f"`{name}`" for name in DROPPED) + "."),
    }
    text, count = MARKED.subn(lambda found: found[1] + lists[found[2]], text)
    assert count == len(lists), "docs/settings.md has lost its marks"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text()))
    (PROJECT_DIR / ".env.example").write_text("\n".join(example_lines()) + "\n")
