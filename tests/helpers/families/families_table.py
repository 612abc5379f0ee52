"""Writes the table of docs/formats.md: of each family what is read, or why it is not.

    .venv/bin/python -m tests.helpers.families.families_table

The text around the table stays as it is. A test holds the table to what is read. What is read in
full leaves families_left.json; who is not has to be given a reason there first.
"""

import json
import logging
import sys
from collections.abc import Sequence
from typing import Final

from hearth.shared.settings_from_env import PROJECT_DIR
from tests.helpers.families.family_cases import DATA, family_names, written_family
from tests.helpers.families.family_checks import COLUMNS, WRONG, FamilyChecks

PAGE: Final = PROJECT_DIR / "docs" / "formats.md"
BEGIN: Final = "<!-- families: begin, written by tests/helpers/families/families_table.py -->\n"
END: Final = "<!-- families: end -->\n"
# Family -> why it is not read in full; one that is has no place there.
REASONS: Final = DATA / "families_left.json"
LEFT: Final[dict[str, str]] = json.loads(REASONS.read_text())


def line_of(name: str, cells: Sequence[str]) -> str:
    """Return a family's line of the table."""
    why = LEFT.get(name, "") if WRONG in cells else "in full"
    return f"| {' | '.join((name, *cells, why))} |"


def lines() -> dict[str, str]:
    """Return the page's lines by family."""
    _, _, rest = PAGE.read_text().partition(BEGIN)
    rows = rest.partition(END)[0].splitlines()[4:]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def is_in_full(line: str) -> bool:
    return WRONG not in line


def main() -> None:
    logging.disable(logging.CRITICAL)
    if sys.argv[1:]:
        print(*(FamilyChecks(written_family(name)).faults for name in sys.argv[1:]), sep="\n")
        return
    names = sorted(family_names(is_real=True) + family_names(is_real=False))
    rows = {name: line_of(name, FamilyChecks(written_family(name)).cells()) for name in names}
    full = sum(map(is_in_full, rows.values()))
    left = {name: why for name, why in LEFT.items() if not is_in_full(rows[name])}
    REASONS.write_text(json.dumps(left, indent=1, ensure_ascii=False) + "\n")
    head = (f"{full} of {len(rows)} are read in full.", "", f"| family | {' | '.join(COLUMNS)} | |")
    table = "\n".join((*head, "|---" * (len(COLUMNS) + 2) + "|", *rows.values()))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table}\n{END}{rest.partition(END)[2]}")
    print(table)


if __name__ == "__main__":
    main()
