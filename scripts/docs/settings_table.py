"""Writes the lists of docs/settings.md from the tables of `hearth.shared`: settings, dropped names.

    .venv/bin/python -m scripts.docs.settings_table

The text around the lists stays as it is. A test holds the file equal to what this writes.
"""

from pathlib import Path
from typing import Final

from hearth.shared.dropped_settings import DROPPED
from hearth.shared.settings_from_env import PROJECT_DIR, example_lines
from scripts.docs.wrapped_line import wrapped

PAGE: Final = PROJECT_DIR / "docs" / "settings.md"
BEGIN: Final = "<!-- settings: begin, written by scripts/docs/settings_table.py -->\n"
END: Final = "<!-- settings: end -->\n"
DROPPED_BEGIN: Final = "<!-- dropped: begin, written by scripts/docs/settings_table.py -->\n"
DROPPED_END: Final = "<!-- dropped: end -->\n"


def settings_list() -> str:
    """Return the settings as a Markdown list, in the order of `.env.example`."""
    rows = []
    lines = example_lines()
    for about, setting in zip(lines[::2], lines[1::2], strict=True):
        name, default = setting.split("=", 1)
        shown = f"`{default}`" if default else "empty"
        rows.append(wrapped(f"- `{name}` ({shown}): {about.removeprefix('# ')}"))
    return "".join(rows)


def dropped_list() -> str:
    """Return the names of the settings that are not read."""
    return wrapped(", ".join(f"`{name}`" for name in DROPPED) + ".")


def with_lists(text: str) -> str:
    """Return the page's text with both lists between their marks written anew."""
    text = _with(text, BEGIN, settings_list(), END)
    return _with(text, DROPPED_BEGIN, dropped_list(), DROPPED_END)


def _with(text: str, begin: str, rows: str, end: str) -> str:
    before, found_begin, rest = text.partition(begin)
    _, found_end, behind = rest.partition(end)
    assert found_begin and found_end, "docs/settings.md has lost its marks"
    return f"{before}{begin}{rows}{end}{behind}"


def main(page: Path = PAGE) -> None:
    page.write_text(with_lists(page.read_text()))


if __name__ == "__main__":
    main()
