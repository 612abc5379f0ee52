"""The documents are short where they promise it, and all that they name is there."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts.docs import settings_table
from tests.helpers.documents import GUIDES, ROOT, anchors, code_spans, prose

README = ROOT / "README.md"
SECURITY = ROOT / "SECURITY.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
CONTEXT = sorted((ROOT / ".context").glob("*.md"))
SPECIFICATION = ROOT / ".context" / "SPECIFICATION.md"
PAGES = [*GUIDES, SECURITY, CONTRIBUTING, ROOT / "CHANGELOG.md"]
RULES = sorted((ROOT / ".claude" / "rules").glob("*.md"))
AGENT_PAGES = [ROOT / "CLAUDE.md", *RULES]
FOLDERS = "proxy|worker|shared|scripts|tests|docs|bench"
PATH = re.compile(rf"(?<![\w/.~$-])((?:{FOLDERS}|\.context|\.claude)/[\w./*-]*[\w/*])")
FILE = re.compile(r"(?<![\w/:.-])[\w./-]*\w\.(?:md|py)\b")
TEST = re.compile(r"\b(tests/[\w/]+\.py)::\s*(test_\w+)")
# Files of other projects that a comment names.
FILES_ELSEWHERE = {"encoder.py", "qwen3_5.py"}
# Papers that the project has beside the repository: a reader of it cannot open them.
UNREADABLE = re.compile(
    r"\b(?:facts|seeds|prototypes)/|\bshared/(?:traces|tools|DESIGN|STYLE)"
    r"|\bDESIGN\b|\bSTYLE(?:\.md|'s)|\b[Ss]eed 00\d|\b[Ii]ssue \d\d?\b|\bthe (?:seed|issue)'s\b"
)
WORDS_ELSEWHERE = (
    *("dual-pipeline cache keys", "block-hash cache", "session turn store", "session index"),
    *("healing store", "model lock", "watchdog"),
)


@cache
def tree() -> list[str]:
    """Return the paths of the files in the checkout's own folders."""
    found = [path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.*")]
    paths = [path.relative_to(ROOT).as_posix() for path in (*found, *ROOT.glob("*.py"))]
    return [path for path in paths if "__pycache__" not in path]


def by_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 90


@pytest.mark.parametrize("page", [*PAGES, *CONTEXT], ids=by_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, todo = set(), [README]
    while todo:
        page = todo.pop()
        seen.add(page)
        for target in re.findall(r"\]\(([\w./-]+\.md)", page.read_text()):
            linked = (page.parent / target).resolve()
            if linked not in seen:
                todo.append(linked)
    assert [page.name for page in PAGES if page not in seen] == []


@pytest.mark.parametrize(
    "page",
    [*GUIDES, SECURITY, CONTRIBUTING, *CONTEXT, *AGENT_PAGES],
    ids=by_name,
)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    missing = []
    for span in [*code_spans(page), *re.findall(r"<!-- not run: (.+) -->", page.read_text())]:
        for path in PATH.findall(span):
            if not any(ROOT.glob(path.rstrip("/"))):
                missing.append(path)
        is_tail = re.fullmatch(r"[\w/.-]+\.py", span) and not PATH.match(span)
        if is_tail and not is_in_tree(span):
            missing.append(span)
    assert missing == []


def is_in_tree(name: str) -> bool:
    return name in tails()


@cache
def tails() -> frozenset[str]:
    """Return the paths of `tree`, and what is left of each without its first folders."""
    parts = [path.split("/") for path in tree()]
    return frozenset("/".join(path[at:]) for path in parts for at in range(len(path)))


def comments(path: Path) -> Iterator[str]:
    """Yield the comments and the docstrings of a module."""
    text = path.read_text()
    yield from re.findall(r"(?m)(?:^ *|  )#(.*)$", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""


@pytest.mark.parametrize("top", [*FOLDERS.split("|"), "install_and_run.py"])
def test_every_file_that_a_comment_names_is_there(top: str) -> None:
    missing = []
    for path in (each for each in tree() if each.startswith(top) and each.endswith(".py")):
        for comment in comments(ROOT / path):
            paths = PATH.findall(comment)
            missing += [(path, each) for each in paths if not any(ROOT.glob(each.rstrip("/")))]
            names = set(FILE.findall(comment)) - set(paths) - FILES_ELSEWHERE
            missing += [
                (path, each)
                for each in names
                if not (ROOT / each).exists() and not is_in_tree(each)
            ]
    assert missing == []


def readable_texts() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file of code or prose, this one left out."""
    loose = [*AGENT_PAGES, *PAGES, *CONTEXT, ROOT / ".env.example", ROOT / "pyproject.toml"]
    paths = [each for each in tree() if each.endswith((".py", ".md", ".html", ".js", ".css"))]
    for path in {*(by_name(page) for page in loose), *paths}:
        if ROOT / path != Path(__file__):
            yield path, (ROOT / path).read_text()


def test_no_text_sends_its_reader_to_what_is_not_in_the_repository() -> None:
    texts = dict(readable_texts())
    assert len(texts) > 300
    found = [(path, UNREADABLE.findall(text)) for path, text in texts.items()]
    assert [row for row in found if row[1]] == []


def test_every_test_that_is_named_with_its_file_is_there() -> None:
    named = {pair for _, text in readable_texts() for pair in TEST.findall(text)}
    missing = [
        (path, name)
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}" not in (ROOT / path).read_text()
    ]
    assert missing == []
    assert len(named) > 15


def items() -> list[str]:
    """Return the items of the specification, each with its file and what holds it."""
    return re.findall(r"(?m)^- (.+)$", SPECIFICATION.read_text())


def test_each_item_of_the_specification_is_held_or_says_why_not() -> None:
    held = re.compile(r": .*(?:`tests/\S+::|decisions? \d|not ours|= |superseded)")
    assert [item for item in items() if not held.search(item)] == []
    assert f"{len(items())} items" in SPECIFICATION.read_text()


@pytest.mark.parametrize("page", RULES, ids=by_name)
def test_a_rule_for_agents_is_for_files_that_are_there(page: Path) -> None:
    """The form is Claude Code's: a list of quoted patterns under `paths`, and nothing else."""
    front = re.match(r"---\npaths:\n((?:  - \"[^\"\n]+\"\n)+)---\n# ", page.read_text())
    assert front, page.read_text()[:200]
    patterns = re.findall(r'"(.+)"', front[1])
    assert [each for each in patterns if not any(ROOT.glob(each))] == []


@pytest.mark.parametrize("term", WORDS_ELSEWHERE)
def test_a_word_of_the_specification_is_told_with_its_module(term: str) -> None:
    shown = (ROOT / "docs" / "architecture.md").read_text().lower()
    rows = [row for row in shown.splitlines() if row.startswith("|") and term in row]
    assert any(PATH.findall(row) for row in rows), term


def test_the_tree_has_every_folder_of_the_code() -> None:
    shown = (ROOT / "docs" / "architecture.md").read_text()
    folders = {Path(path).parent.as_posix() for path in tree() if path.endswith(".py")}
    ours = {each for each in folders if re.match(r"(proxy|worker|shared)\b", each)}
    empty = {each for each in ours if sizes(each) == {0}}
    assert [each for each in sorted(ours - empty) if f"`{each}/`" not in shown] == []


def sizes(folder: str) -> set[int]:
    return {path.stat().st_size for path in (ROOT / folder).glob("*.py")}


def test_the_page_of_settings_is_what_the_table_of_settings_makes_it() -> None:
    text = settings_table.PAGE.read_text()
    remedy = "run .venv/bin/python -m scripts.docs.settings_table"
    assert text == settings_table.with_lists(text), remedy


def test_every_name_of_the_code_that_a_contributor_is_told_of_is_there() -> None:
    named = re.findall(r"`(_?[A-Za-z]\w+)(?:\(\w+\))?`", CONTRIBUTING.read_text())
    sources = [ROOT / path for path in tree() if path.endswith(".py")]
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
    assert set(named) - words == set()
    assert len(named) > 20
