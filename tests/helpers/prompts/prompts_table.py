"""Writes the tables of docs/prompts.md: what of each template's prompts is the makers' own.

    .venv/bin/python -m tests.helpers.prompts.prompts_table

The text around the tables stays as it is. A test holds them to what is measured. With words of
templates' names it tells what each prompt of theirs is, and writes nothing.
"""

import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.helpers.families.family_cases import FAMILIES
from tests.helpers.families.real_templates import real_templates
from tests.helpers.prompts.conversations import CONVERSATIONS, DATA, IN_DIALECTS
from tests.helpers.prompts.departures import DEPARTURES
from tests.helpers.prompts.prompt_checks import EQUAL, NEITHER, REFUSED, Found, PromptChecks

PAGE: Final = Path(__file__).parents[3] / "docs" / "prompts.md"
BEGIN: Final = "<!-- {}: begin, written by tests/helpers/prompts/prompts_table.py -->\n"
END: Final = "<!-- {}: end -->\n"
BEFORE: Final = DATA / "before.json"
# Those of the table that are our own: their makers publish theirs under a licence of their own.
OWN: Final = ("kimi_k2_thinking.jinja",)
# A file of a package whose name tells nothing.
_RENAMED: Final = {"chat_template.jinja": "gmlx-DeepSeek-V4.1.jinja"}
_KINDS: Final = (EQUAL, "departing", REFUSED, NEITHER)
_HEAD: Final = ("template", *_KINDS, "Messages", "Responses", "Ollama", "before", "departs by")


def sources() -> dict[str, str]:
    """Return the templates by name. Raises FetchError where they are not to be had."""
    names = {path: path.name.rpartition("+")[2] for path in real_templates().glob("*.jinja")}
    real = {_RENAMED.get(name, name): path.read_text() for path, name in names.items()}
    own = {name: (FAMILIES / name).read_text() for name in OWN}
    return dict(sorted((real | own).items(), key=lambda row: row[0].lower()))


def kinds(found: Mapping[str, str]) -> list[int]:
    """Return how many prompts are of each of _KINDS."""
    counts = Counter(kind if kind in _KINDS else "departing" for kind in found.values())
    return [counts[kind] for kind in _KINDS]


def line_of(name: str, found: Found) -> str:
    """Return a template's line of the table."""
    chat, *dialects = (kinds(each) for each in found.values())
    right = [f"{sum(each[:3])} of {len(IN_DIALECTS)}" for each in dialects]
    by = Counter(each for kind in found["chat"].values() for each in kind.split(" + "))
    before = json.loads(BEFORE.read_text())[name]
    told = ", ".join(f"{each[0]} {by[each[0]]}" for each in DEPARTURES if each[0] in by)
    return f"| {' | '.join((name, *map(str, chat), *right, str(before[3]), told))} |"


def lines() -> dict[str, str]:
    """Return the page's lines by template."""
    rest = PAGE.read_text().partition(BEGIN.format("templates"))[2]
    rows = rest.partition(END.format("templates"))[0].splitlines()[5:]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def departures_table(rows: Sequence[str]) -> str:
    """Return the table of departures, as the lines of the templates count them."""
    told = [row.rpartition(" | ")[2].removesuffix(" |").split(", ") for row in rows]
    parted = [each.rpartition(" ") for row in told for each in row if each]
    counts = {name: [int(n) for other, _, n in parted if other == name] for name, _, _ in parted}
    head = "| departure | what is changed | why | templates | prompts |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| {name} | {changed} | {reason} | {len(counts[name])} | {sum(counts[name]):,} |\n"
        for name, changed, reason, *_ in DEPARTURES
        if name in counts
    )


def templates_table(rows: Sequence[str]) -> str:
    """Return the table of templates below lines with its sums, and those before."""
    counts = [[int(cell) for cell in row.split(" | ")[1:5]] for row in rows]
    now, before = (
        ", ".join(f"{sum(row[at] for row in each):,} {kind}" for at, kind in enumerate(_KINDS))
        for each in (counts, json.loads(BEFORE.read_text()).values())
    )
    told = f"Of {len(CONVERSATIONS) * len(rows):,} prompts in chat: {now}.\nBefore: {before}."
    line = "|---" * len(_HEAD) + "|"
    return "\n".join((told, "", f"| {' | '.join(_HEAD)} |", line, *rows)) + "\n"


def with_tables(page: str, rows: Sequence[str]) -> str:
    """Return the page with both tables written anew."""
    for name, write in (("departures", departures_table), ("templates", templates_table)):
        before, _, rest = page.partition(BEGIN.format(name))
        behind = rest.partition(END.format(name))[2]
        page = f"{before}{BEGIN.format(name)}{write(rows)}{END.format(name)}{behind}"
    return page


def main() -> None:
    logging.disable(logging.CRITICAL)
    all_of = sources()
    wanted = [name for name in all_of if any(word in name for word in sys.argv[1:])]
    found = {name: PromptChecks(name, all_of[name]).found for name in wanted or all_of}
    rows = [line_of(*row) for row in found.items()]
    if wanted:
        print(json.dumps(found, indent=1), *rows, sep="\n")
    else:
        PAGE.write_text(with_tables(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
