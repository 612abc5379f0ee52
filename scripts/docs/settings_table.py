"""Writes the tables of docs/settings.md, from those of `hearth.shared`: settings and dropped ones.

    .venv/bin/python -m scripts.docs.settings_table

The text around the tables stays as it is. A test holds the file equal to what this writes.
"""

from pathlib import Path
from typing import Final

from hearth.shared.dropped_settings import DROPPED
from hearth.shared.settings_from_env import PROJECT_DIR, example_lines

PAGE: Final = PROJECT_DIR / "docs" / "settings.md"
BEGIN: Final = "<!-- settings: begin, written by scripts/docs/settings_table.py -->\n"
END: Final = "<!-- settings: end -->\n"
DROPPED_BEGIN: Final = "<!-- dropped: begin, written by scripts/docs/settings_table.py -->\n"
DROPPED_END: Final = "<!-- dropped: end -->\n"


def table() -> str:
    """Return the settings as a Markdown table, in the order of `.env.example`."""
    rows = ["| setting | default | what it does |", "|---|---|---|"]
    lines = example_lines()
    for about, setting in zip(lines[::2], lines[1::2], strict=True):
        name, default = setting.split("=", 1)
        shown = f"`{default}`" if default else "empty"
        rows.append(f"| `{name}` | {shown} | {about.removeprefix('# ')} |")
    return "\n".join(rows) + "\n"


def dropped_table() -> str:
    """Return the settings that are not read, and what to do instead, as a Markdown table."""
    rows = ["| setting | why, and what instead |", "|---|---|"]
    rows += [f"| `{name}` | {reason} |" for name, reason in DROPPED.items()]
    return "\n".join(rows) + "\n"


def with_tables(text: str) -> str:
    """Return the page's text with both tables between their marks written anew."""
    text = _with(text, BEGIN, table(), END)
    return _with(text, DROPPED_BEGIN, dropped_table(), DROPPED_END)


def _with(text: str, begin: str, rows: str, end: str) -> str:
    before, found_begin, rest = text.partition(begin)
    _, found_end, behind = rest.partition(end)
    assert found_begin and found_end, "docs/settings.md has lost its marks"
    return f"{before}{begin}{rows}{end}{behind}"


def main(page: Path = PAGE) -> None:
    page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
