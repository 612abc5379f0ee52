"""Writes the lists of docs/prompts.md: what of each template's prompts is the makers' own.

    .venv/bin/python -m tests.helpers.prompts.prompts_table

The text around the lists stays as it is. A test holds them to what is measured. With words of
templates' names it tells what each prompt of theirs is, and writes nothing.
"""

import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from scripts.docs.wrapped_line import wrapped
from tests.helpers.families.family_cases import FAMILIES
from tests.helpers.families.real_templates import real_templates
from tests.helpers.prompts.conversations import CONVERSATIONS, IN_DIALECTS
from tests.helpers.prompts.departures import DEPARTURES
from tests.helpers.prompts.prompt_checks import EQUAL, NEITHER, REFUSED, Found, PromptChecks

PAGE: Final = Path(__file__).parents[3] / "docs" / "prompts.md"
BEGIN: Final = "<!-- {}: begin, written by tests/helpers/prompts/prompts_table.py -->\n"
END: Final = "<!-- {}: end -->\n"
# Those of the list that are our own: their makers publish theirs under a licence of their own.
OWN: Final = ("kimi_k2_thinking.jinja",)
# A file of a package whose name tells nothing.
_RENAMED: Final = {"chat_template.jinja": "gmlx-DeepSeek-V4.1.jinja"}
_KINDS: Final = (EQUAL, "departing", REFUSED, NEITHER)
_DIALECTS: Final = ("Messages", "Responses", "Ollama")
# The departures of so many templates that their lines do not name them.
COMMON: Final = (
    *("control text", "developer", "empty content"),
    *("broken arguments", "lines of parts", "later system"),
)


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
    """Return a template's line: prompts that are not equal, and the rarer departures by name."""
    chat, *dialects = (kinds(each) for each in found.values())
    told = [f"{count} {kind}" for count, kind in zip(chat[1:], _KINDS[1:], strict=True) if count]
    told += [
        f"{dialect} {sum(each[:3])} of {len(IN_DIALECTS)}"
        for dialect, each in zip(_DIALECTS, dialects, strict=True)
        if sum(each[:3]) < len(IN_DIALECTS)
    ]
    by = {each for kind in found["chat"].values() for each in kind.split(" + ")} - {*COMMON}
    named = ", ".join(each.name for each in DEPARTURES if each.name in by)
    return ": ".join(filter(None, (f"- {name.removesuffix('.jinja')}", ", ".join(told), named)))


def lines() -> dict[str, str]:
    """Return the page's lines by template."""
    rest = PAGE.read_text().partition(BEGIN.format("templates"))[2]
    rows = rest.partition(END.format("templates"))[0].replace("\n  ", " ").splitlines()
    return {
        row.removeprefix("- ").partition(": ")[0] + ".jinja": row
        for row in rows
        if row.startswith("- ")
    }


def departures_list(rows: Sequence[str]) -> str:
    """Return the departures that the templates' lines name, and those that are common."""
    named = {*COMMON, *(name for row in rows for name in row.split(": ")[-1].split(", "))}
    return "".join(
        wrapped(
            f"- **{each.name}**{' (common)' if each.name in COMMON else ''}: {each.changed}. "
            f"{each.reason}"
        )
        for each in DEPARTURES
        if each.name in named
    )


def templates_list(rows: Sequence[str]) -> str:
    """Return the lines of the templates, below their sums."""
    text, prompts = "\n".join(rows), len(CONVERSATIONS) * len(rows)
    sums = {kind: sum(map(int, re.findall(rf"(\d+) {kind}", text))) for kind in _KINDS[1:]}
    told = ", ".join(f"{count:,} {kind}" for kind, count in sums.items())
    first = f"Of {prompts:,} prompts in chat: {prompts - sum(sums.values()):,} {EQUAL}, {told}."
    return "".join((first, "\n\n", *map(wrapped, rows)))


def with_lists(page: str, rows: Sequence[str]) -> str:
    """Return the page with both lists written anew."""
    for name, write in (("departures", departures_list), ("templates", templates_list)):
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
        PAGE.write_text(with_lists(PAGE.read_text(), rows))


if __name__ == "__main__":
    main()
