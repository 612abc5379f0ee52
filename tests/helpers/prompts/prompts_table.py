"""Writes the tables of docs/prompts.md: what of each template's prompts is the makers' own.

    .venv/bin/python -m tests.helpers.prompts.prompts_table

The text around the tables stays as it is. A test holds them to what is measured. With words of
templates' names it tells what each prompt of theirs is, and writes nothing.
"""

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
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
    by: Counter[str] = Counter()
    for kind in found["chat"].values():
        by.update([] if kind in _KINDS else kind.split(" + "))
    names = [each.name for each in DEPARTURES if each.name in by]
    before = json.loads(BEFORE.read_text()).get(name, [])
    told = ", ".join(f"{each} {by[each]}" for each in names)
    return f"| {' | '.join((name, *map(str, chat), *right, *map(str, before[3:4]), told))} |"


def lines() -> dict[str, str]:
    """Return the page's lines by template."""
    rest = PAGE.read_text().partition(BEGIN.format("templates"))[2]
    rows = rest.partition(END.format("templates"))[0].splitlines()[4:]
    return {row.split(" | ")[0].removeprefix("| "): row for row in rows}


def departures_table(rows: Iterable[str]) -> str:
    """Return the table of departures, as the lines of the templates count them."""
    templates: Counter[str] = Counter()
    prompts: Counter[str] = Counter()
    for row in rows:
        for told in filter(None, row.rpartition(" | ")[2].removesuffix(" |").split(", ")):
            name, _, count = told.rpartition(" ")
            templates[name] += 1
            prompts[name] += int(count)
    head = "| departure | what is changed | why | templates | prompts |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| {each.name} | {each.changed} | {each.reason} | {templates[each.name]} "
        f"| {prompts[each.name]:,} |\n"
        for each in DEPARTURES
        if templates[each.name]
    )


def templates_table(rows: Iterable[str]) -> str:
    """Return the table of templates below a line with its sums."""
    counts = [[int(cell) for cell in row.split(" | ")[1:5]] for row in rows]
    sums = [f"{sum(column):,} {kind}" for column, kind in zip(zip(*counts), _KINDS, strict=True)]
    kept = zip(*json.loads(BEFORE.read_text()).values())
    before = [f"{sum(column):,} {kind}" for column, kind in zip(kept, _KINDS)]
    told = f"Of {len(CONVERSATIONS) * len(counts):,} prompts in chat: {', '.join(sums)}."
    line = "|---" * len(_HEAD) + "|"
    first = f"{told} Before: {', '.join(before)}."
    return "\n".join((first, "", f"| {' | '.join(_HEAD)} |", line, *rows)) + "\n"


def with_tables(page: str, rows: Iterable[str]) -> str:
    """Return the page with both tables written anew."""
    for name, table in (
        ("departures", departures_table(rows)),
        ("templates", templates_table(rows)),
    ):
        before, _, rest = page.partition(BEGIN.format(name))
        behind = rest.partition(END.format(name))[2]
        page = f"{before}{BEGIN.format(name)}{table}{END.format(name)}{behind}"
    return page


def main() -> None:
    logging.disable(logging.CRITICAL)
    all_of = sources()
    wanted = [name for name in all_of if any(word in name for word in sys.argv[1:])]
    found = {}
    for name in wanted or all_of:
        found[name] = PromptChecks(name, all_of[name]).found
        print(line_of(name, found[name]), flush=True)
        if wanted:
            rows = [(where, *row) for where, each in found[name].items() for row in each.items()]
            print(*rows, sep="\n")
    if not wanted:
        rows = [line_of(name, each) for name, each in found.items()]
        PAGE.write_text(with_tables(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
