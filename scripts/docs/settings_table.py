"""Writes the table of settings into docs/settings.md, from the table in `hearth.shared.settings`.

    .venv/bin/python -m scripts.docs.settings_table

The text around the table stays as it is. A test holds the file equal to what this writes.
"""

from pathlib import Path
from typing import Final

from hearth.shared.settings_from_env import PROJECT_DIR, example_lines

PAGE: Final = PROJECT_DIR / "docs" / "settings.md"
BEGIN: Final = "<!-- settings: begin, written by scripts/docs/settings_table.py -->\n"
END: Final = "<!-- settings: end -->\n"


def table() -> str:
    """Return the settings as a Markdown table, in the order of `.env.example`."""
    rows = ["| setting | default | what it does |", "|---|---|---|"]
    lines = example_lines()
    for about, setting in zip(lines[::2], lines[1::2], strict=True):
        name, default = setting.split("=", 1)
        shown = f"`{default}`" if default else "empty"
        rows.append(f"| `{name}` | {shown} | {about.removeprefix('# ')} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """Return the page's text with the table between its two marks written anew."""
    before, begin, rest = text.partition(BEGIN)
    _, end, behind = rest.partition(END)
    assert begin and end, "docs/settings.md has lost its marks"
    return f"{before}{BEGIN}{table()}{END}{behind}"


def main(page: Path = PAGE) -> None:
    page.write_text(with_table(page.read_text()))


if __name__ == "__main__":
    main()
