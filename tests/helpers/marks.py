"""Says what each test file needs, from its place and its source, without importing it.

A file under tests/e2e is `e2e`. Any other file that reaches a heavy library through its imports is
`model`. A file or a test that starts processes or opens sockets says so: `pytest.mark.process`.
All other tests are `pure`.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROJECT_DIR: Final = Path(__file__).parents[2]
HEAVY: Final = {"litellm", "llguidance", "mlx", "mlx_lm", "mlx_vlm", "tokenizers", "transformers"}
BROWSER: Final = {
    *("test_dashboard", "test_dashboard_page"),
    *("test_chat_page", "test_page_hostile", "test_page_requests", "test_page_sign_in"),
}
CLIENTS: Final = {"test_clients", "test_cloud_clients", "test_edits"}

IMPORT: Final = re.compile(
    r"^(?:from ([\w.]+) import (?:\(([^)]*)\)|(.*))|import ([\w.]+))", re.MULTILINE
)
FILE_MARK: Final = re.compile(r"^pytestmark = .*\bmark\.process\b", re.MULTILINE)


@functools.cache
def marks_of(path: Path) -> frozenset[str]:
    """Return the names of the marks that all tests of the file `path` have."""
    if "e2e" in path.relative_to(PROJECT_DIR / "tests").parts:
        sets = {"browser": BROWSER, "clients": CLIENTS}
        return frozenset({"e2e", *(mark for mark, names in sets.items() if path.stem in names)})
    if FILE_MARK.search(path.read_text()):
        return frozenset({"process"})
    return frozenset({"model"} if imports_reached(path) & HEAVY else ())


def pure_files() -> list[str]:
    """Return the files whose tests are pure, unless one of them says otherwise itself."""
    found = sorted((PROJECT_DIR / "tests").rglob("test_*.py"))
    return [str(path.relative_to(PROJECT_DIR)) for path in found if not marks_of(path)]


def imports_reached(path: Path) -> set[str]:
    """Return the top-level names of the libraries that importing `path` imports."""
    reached: set[str] = set()
    seen, todo = {path}, [path]
    while todo:
        own, others = _direct_imports(todo.pop())
        reached |= others
        todo += own - seen
        seen |= own
    return reached


@functools.cache
def _direct_imports(path: Path) -> tuple[frozenset[Path], frozenset[str]]:
    """Return what the module at `path` imports at its top: files of ours, and libraries."""
    own, others = set(), set()
    for name in _imported_names(path.read_text()):
        file = _file_of(name)
        if file is not None:
            own.add(file)
        elif name.split(".")[0] not in ("hearth", "scripts", "tests"):
            others.add(name.split(".")[0])
    return frozenset(own), frozenset(others)


def _imported_names(source: str) -> Iterator[str]:
    for package, many, few, plain in IMPORT.findall(source):
        yield plain or package
        yield from (f"{package}.{name}" for name in re.findall(r"(\w+)(?: as \w+)?", many or few))


@functools.cache
def _file_of(module: str) -> Path | None:
    """Return the file of `module`, if it is one of this project's."""
    place = module.replace("hearth.commands", "scripts.commands", 1).removeprefix("hearth.")
    base = PROJECT_DIR / place.replace(".", "/")
    candidates = (base.with_suffix(".py"), base / "__init__.py", base / "__main__.py")
    return next((file for file in candidates if file.is_file()), None)
