"""Writes the table of architectures in docs/models.md, from what was recorded of them.

    .venv/bin/python -m scripts.docs.architectures_table

`python -m scripts.harness.architectures --record` serves and records them. Tests hold the page
equal to this.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any, Final

import yaml

from hearth.shared.paths import PROJECT_DIR
from scripts.docs.wrapped_line import wrapped

PAGE: Final = PROJECT_DIR / "docs" / "models.md"
DATA: Final = PROJECT_DIR / "tests" / "data" / "architectures"
RECORDED: Final = DATA / "recorded.json"
MARKED: Final = re.compile(
    r"(<!-- architectures: begin, .*? -->\n).*?(?=<!-- architectures: end -->\n)", re.DOTALL
)
LIBRARIES: Final = ("mlx_lm", "mlx_vlm")


def recorded() -> dict[str, dict[str, Any]]:
    """Return the rows of the table, by library and name."""
    return dict(json.loads(RECORDED.read_text("utf-8")))


@cache
def left_out() -> dict[str, str]:
    """Return why an architecture is not served with full reuse, by library and name."""
    lists = yaml.load((DATA / "left_out.yaml").read_bytes(), yaml.CSafeLoader)
    return {name: why for why, names in lists.items() for name in names}


def table() -> str:
    """Return the architectures by their layers' caches, and why others are left out."""
    groups: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for name, row in recorded().items():
        if row.get("reuse") == "full" and name not in left_out():
            groups[_kinds(row["caches"])][name] = row
    lines = ["| caches of the layers | architectures | answers |\n|---|---|---|\n"]
    for kinds, rows in sorted(groups.items(), key=lambda item: -len(item[1])):
        answers, ties = (sum(row.get(part, 0) for row in rows.values()) for part in TOLD)
        told = f"{answers:,}" + (f", {ties} ties" if ties else "")
        lines.append(f"| {kinds} | {_listed(rows)} | {told} |\n")
    whys = sorted(set(left_out().values()), key=list(left_out().values()).index)
    rest = (f"- {why}: {_listed(n for n in left_out() if left_out()[n] == why)}" for why in whys)
    return "".join([*lines, "\nLeft out, since\n", *map(wrapped, rest)])


TOLD: Final = ("answers", "ties")


def _kinds(layout: str) -> str:
    """Return the classes in a layout such as "2 x KVCache, 1 x CacheList(KVCache, KVCache)"."""
    found = dict.fromkeys(re.split(r", (?=\d+ x )|^(?=\d+ x )", layout))
    return ", ".join(sorted(f"`{re.sub(r'^[0-9]+ x ', '', kind)}`" for kind in found if kind))


def _listed(names: Iterable[str]) -> str:
    """Return names by their library."""
    own = [name.split("/") for name in names]
    parts = {
        library: ", ".join(f"`{name}`" for lib, name in own if lib == library)
        for library in LIBRARIES
    }
    return "; ".join(
        f"{library.replace('_', '-')}: {told}" for library, told in parts.items() if told
    )


def with_table(text: str) -> str:
    """Return the page's text with the table written anew."""
    text, count = MARKED.subn(lambda found: found[1] + table(), text)
    assert count == 1, "docs/models.md has lost its marks"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
