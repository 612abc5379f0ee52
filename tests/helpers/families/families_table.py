"""Tells in docs/formats.md which families are read in full, and of the others what is not, and why.

    .venv/bin/python -m tests.helpers.families.families_table

The text around it stays as it is. A test holds the page to what is read. What is read in full
leaves families_left.json; who is not has to be given a reason there first.
"""

import json
import logging
import sys
from collections.abc import Sequence
from typing import Final

from hearth.shared.paths import PROJECT_DIR
from scripts.docs.wrapped_line import wrapped
from tests.helpers.families.family_cases import DATA, family_names, written_family
from tests.helpers.families.family_checks import COLUMNS, WRONG, FamilyChecks

PAGE: Final = PROJECT_DIR / "docs" / "formats.md"
BEGIN: Final = "<!-- families: begin, written by tests/helpers/families/families_table.py -->\n"
END: Final = "<!-- families: end -->\n"
IN_FULL: Final = " are read in full: "
# Family -> why it is not read in full; one that is has no place there.
REASONS: Final = DATA / "families_left.json"
LEFT: Final[dict[str, str]] = json.loads(REASONS.read_text())


def line_of(name: str, cells: Sequence[str]) -> str:
    """Return what the page has of a family: its name, or its row where it is not read in full."""
    if WRONG in cells:
        return f"| {' | '.join((name, *cells, LEFT.get(name, '')))} |"
    read, _, odd = cells[-1].partition(" of ")
    return name if read == odd or not odd else f"{name} ({cells[-1]})"


def is_in_full(line: str) -> bool:
    return not line.startswith("|")


def lines() -> dict[str, str]:
    """Return what the page has, by family."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    full, _, rows = rest.partition(END)[0].partition("\n\n")
    _, _, names = " ".join(full.split()).removesuffix(".").partition(IN_FULL)
    found = {each.partition(" ")[0]: each for each in names.split(", ")}
    return found | {row.split(" | ")[0].removeprefix("| "): row for row in rows.splitlines()[2:]}


def page_part(told: Sequence[str]) -> str:
    """Return what stands between the marks, of the families' lines."""
    full = [line for line in told if is_in_full(line)]
    text = f"{len(full)} of {len(told)}{IN_FULL}{', '.join(full)}."
    part = wrapped(text)
    if rows := [line for line in told if not is_in_full(line)]:
        head = f"| family | {' | '.join(COLUMNS)} | |"
        part += "\n".join(("", head, "|---" * (len(COLUMNS) + 2) + "|", *rows, ""))
    return part


def main() -> None:
    logging.disable(logging.CRITICAL)
    if sys.argv[1:]:
        print(*(FamilyChecks(written_family(name)).faults for name in sys.argv[1:]), sep="\n")
        return
    names = sorted(family_names(is_real=True) + family_names(is_real=False))
    rows = {name: line_of(name, FamilyChecks(written_family(name)).cells()) for name in names}
    left = {name: why for name, why in LEFT.items() if not is_in_full(rows[name])}
    REASONS.write_text(json.dumps(left, indent=1, ensure_ascii=False) + "\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{page_part(list(rows.values()))}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
