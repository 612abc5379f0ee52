#!/usr/bin/env python
"""Counts what a maintainer has to hold in the head: files, lines, statements, functions by room.

    python -m scripts.count_house [CHECKOUT] [--rooms]

Statements are what goals are set in: no formatting and no missing docstring changes them. Only
files that git tracks count.
"""

import argparse
import ast
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from hearth.shared.paths import PROJECT_DIR

# Part -> what the paths of its files begin with; a file is of the first that fits.
PARTS: Final = {
    "product": ("proxy/", "worker/", "shared/", "install_and_run.py"),
    "commands": ("scripts/commands/",),
    "dev scripts": ("scripts/",),
    "tests": ("tests/",),
}


class Counts(NamedTuple):
    """What was counted of some modules. Immutable."""

    files: int = 0
    lines: int = 0
    statements: int = 0
    functions: int = 0
    classes: int = 0

    @classmethod
    def of(cls, text: str) -> "Counts":
        """Count one module."""
        nodes = list(ast.walk(ast.parse(text)))
        return cls(
            files=1,
            lines=text.count("\n"),
            statements=sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes),
            functions=sum(
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes
            ),
            classes=sum(isinstance(node, ast.ClassDef) for node in nodes),
        )


def _is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring or another bare string."""
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def part_of(name: str) -> str:
    return next((part for part, starts in PARTS.items() if name.startswith(starts)), "other")


def tracked(root: Path) -> list[str]:
    """Return the paths of the checkout's tracked files that are there."""
    names = subprocess.check_output(["git", "-C", root, "ls-files", "-z"], text=True).split("\0")
    return [name for name in names if name and (root / name).is_file()]


def print_counts(kind: str, counts: Iterable[tuple[str, Counts]]) -> None:
    """Print a line for each name, the most statements first."""
    sums: dict[str, Counts] = defaultdict(Counts)
    for name, each in counts:
        sums[name] = Counts(*map(sum, zip(sums[name], each, strict=True)))
    print(f"{kind:<44}" + "".join(f"{field:>11}" for field in Counts._fields))
    for name, total in sorted(sums.items(), key=lambda row: -row[1].statements):
        print(f"{name:<44}" + "".join(f"{count:>11,}" for count in total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=PROJECT_DIR)
    parser.add_argument("--rooms", action="store_true", help="a line for each folder too")
    options = parser.parse_args()
    root, names = options.checkout, tracked(options.checkout)
    code = {each: Counts.of((root / each).read_text()) for each in names if each.endswith(".py")}
    print_counts("part", ((part_of(name), counts) for name, counts in code.items()))
    if options.rooms:
        print_counts("room", ((str(Path(name).parent), each) for name, each in code.items()))
    words = {each: len((root / each).read_text().split()) for each in names if each.endswith(".md")}
    longest = Counter(words).most_common(6)
    print(
        f"documents: {len(words)} pages, {sum(words.values()):,} words; longest:",
        ", ".join(f"{name} {count:,}" for name, count in longest),
    )
    nbytes = sum((root / name).stat().st_size for name in names)
    print(f"tracked files: {len(names):,}, {nbytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
