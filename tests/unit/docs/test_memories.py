"""Every memory that outlives a request stands in SECURITY.md, with whom it serves."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.helpers.documents import ROOT

# What a memory is made of, where an attribute or a module holds it. Plain dicts and lists are not
# told from what is there for one request: those of the server's objects are watched as it runs
# (tests/unit/worker/test_memories.py, tests/unit/proxy/test_memories.py).
KINDS = {"OrderedDict", "MemoryByOwner", "deque", "WeakValueDictionary", "WeakKeyDictionary"}
CACHES = {"lru_cache", "cache"}
# Those that end with a request, a thread's queue or a step.
SHORT_LIVED = {
    "proxy/pool/answer_stream.py": "one answer's events",
    "proxy/request/model_names.py": "that the former model's name was told: nothing of a request",
    "shared/durable_journal_writer.py": "records that wait for the disk",
    "shared/zmq_transport.py": "frames that wait for a socket",
    "worker/constraint/thinking_budget.py": "one answer's forced tokens",
    "worker/disk/disk_thread.py": "work that waits for the disk",
    "worker/formats/shared/model_format.py": "the formats of this program: nothing of a request",
    "worker/schedule/scheduler.py": "requests that wait",
    "worker/stream/output_processor.py": "one answer's log probabilities",
}


def sources() -> Iterator[Path]:
    for folder in ("proxy", "worker", "shared"):
        yield from (ROOT / folder).rglob("*.py")


def is_memory(node: ast.AST) -> bool:
    """Tell whether `node` makes something that remembers."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        names = [row.func if isinstance(row, ast.Call) else row for row in node.decorator_list]
        return any(name_of(name) in CACHES for name in names)
    is_kept = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
        node.target if isinstance(node, ast.AnnAssign) else node.targets[0], ast.Attribute
    )
    found = ast.walk(node) if is_kept else ()
    return any(isinstance(row, ast.Call) and name_of(row.func) in KINDS for row in found)


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@cache
def memories() -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if any(map(is_memory, ast.walk(ast.parse(path.read_text()))))
    }


def listed() -> set[str]:
    page = (ROOT / "SECURITY.md").read_text()
    table = page.split("## What outlives a request")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {path for row in rows for path in re.findall(r"`([\w/]+\.py)`", row)}


def test_every_memory_is_listed_with_whom_it_serves() -> None:
    found = memories()
    assert len(found) > 15, "the search finds them"
    assert found - SHORT_LIVED.keys() - listed() == set()


def test_what_is_called_short_lived_is_there_and_not_listed_too() -> None:
    assert SHORT_LIVED.keys() <= memories()
    assert not SHORT_LIVED.keys() & listed()
