"""Writes SECURITY.md's table of what outlives a request, from what the memories say of themselves.

    .venv/bin/python -m scripts.docs.memories_table

Each says it above the statement that makes it: `# Kept for one key: token ids of texts`, or for
everybody, for nobody, or for a moment, which is not listed. Tests hold the page equal to this, and
that every OrderedDict, deque, weak dict, MemoryByOwner and cached function says it. Plain dicts and
lists are not told from what is there for one request: those of the server's objects are watched as
it runs (tests/unit/worker/test_memories.py, tests/unit/proxy/test_memories.py).
"""

import ast
import re
from collections.abc import Iterator
from typing import Final

from hearth.shared.paths import PROJECT_DIR

PAGE: Final = PROJECT_DIR / "SECURITY.md"
MARKED: Final = re.compile(r"(?<=\| serves \| what is kept \|\n\|---\|---\|\n)(\|.*\n)+")
SERVED: Final = ("one key", "everybody", "nobody")
KEPT: Final = re.compile(rf"# Kept for ({'|'.join(SERVED)}|a moment): (.+)")
KINDS: Final = {
    *("OrderedDict", "MemoryByOwner", "deque", "WeakValueDictionary", "WeakKeyDictionary"),
    *("lru_cache", "cache"),
}
LINES_MAX: Final = 3  # above a memory, among which it says what it is


def sources() -> Iterator[tuple[str, str]]:
    for folder in ("proxy", "worker", "shared"):
        for path in sorted((PROJECT_DIR / folder).rglob("*.py")):
            yield path.relative_to(PROJECT_DIR).as_posix(), path.read_text()


def told() -> list[tuple[str, str]]:
    """Return whom each memory serves and what it holds, as it says itself."""
    return [row for _, text in sources() for row in KEPT.findall(text)]


def untold(text: str) -> list[int]:
    """Return the lines of a module that make a memory which does not say what it is."""
    lines = text.splitlines()
    made = filter(None, map(_line_of_memory, ast.walk(ast.parse(text))))
    return [at for at in made if not KEPT.search("\n".join(lines[max(0, at - 1 - LINES_MAX) : at]))]


def _line_of_memory(node: ast.AST) -> int:
    """Return where a memory is made that an attribute or a module holds; 0 where none is."""
    made: list[ast.expr] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        made = node.decorator_list
    elif isinstance(node, ast.AnnAssign | ast.Assign) and node.value:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if isinstance(target, ast.Attribute):
            made = [each for each in ast.walk(node.value) if isinstance(each, ast.Call)]
    return made[0].lineno if any(_called(each) in KINDS for each in made) else 0


def _called(node: ast.AST) -> str:
    """Return the name of what a call calls, or of what a decorator is."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def with_table(text: str) -> str:
    """Return the page's text with the table's rows written anew."""
    rows = {who: dict.fromkeys(what for each, what in told() if each == who) for who in SERVED}
    lines = "".join(f"| {who} | {'; '.join(rows[who])} |\n" for who in SERVED)
    text, count = MARKED.subn(lambda _: lines, text)
    assert count == 1, "SECURITY.md has lost its table of memories"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
