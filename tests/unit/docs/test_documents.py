"""The documents are short where they promise it, and all that they name is there."""

import re
from functools import cache
from pathlib import Path

import pytest

from scripts.docs import settings_table
from tests.helpers.documents import GUIDES, ROOT, anchors, code_spans, prose

README = ROOT / "README.md"
SECURITY = ROOT / "SECURITY.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
CONTEXT = sorted((ROOT / ".context").glob("*.md"))
PAGES = [*GUIDES, SECURITY, CONTRIBUTING, ROOT / "CHANGELOG.md"]
README_LINES_MAX = 150
LINE_CHARS_MAX = 120
FOLDERS = "proxy|worker|shared|scripts|tests|docs|bench"
PATH = re.compile(rf"(?<![\w/.~$-])((?:{FOLDERS})/[\w./*-]*[\w/*])")


@cache
def tree() -> list[str]:
    """Return the paths of the files in the checkout's own folders."""
    found = [path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.*")]
    paths = [path.relative_to(ROOT).as_posix() for path in (*found, *ROOT.glob("*.py"))]
    return [path for path in paths if "__pycache__" not in path]


def by_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("page", [*GUIDES, CONTRIBUTING, SECURITY], ids=by_name)
def test_no_line_of_prose_is_long(page: Path) -> None:
    lines = prose(page).splitlines()
    long = [line for line in lines if len(line) > LINE_CHARS_MAX and not line.startswith("|")]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=by_name)
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
    [*GUIDES, SECURITY, CONTRIBUTING, *CONTEXT, ROOT / "bench" / "NOTES.md"],
    ids=by_name,
)
def test_every_file_that_is_named_is_there(page: Path) -> None:
    missing = []
    for span in [*code_spans(page), *re.findall(r"<!-- not run: (.+) -->", page.read_text())]:
        for path in PATH.findall(span):
            if not any(ROOT.glob(path.rstrip("/"))):
                missing.append(path)
        is_tail = re.fullmatch(r"[\w/.-]+\.py", span) and not PATH.match(span)
        if is_tail and not any(f"/{each}".endswith(f"/{span}") for each in tree()):
            missing.append(span)
    assert missing == []


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
    assert text == settings_table.with_table(text), remedy


def test_nobody_is_told_to_install_somebody_elses_package() -> None:
    for page in [*PAGES, *CONTEXT]:
        wrong = re.findall(r"(?:pip|uv|pipx) (?:tool )?install hearth(?!-llm)", page.read_text())
        assert not wrong, page.name


def test_every_test_that_the_threat_model_names_is_there() -> None:
    files = re.findall(r"`(test_\w+\.py)`", SECURITY.read_text())
    named = re.findall(r"`(test_\w+)(?:\.\.\.)?`", SECURITY.read_text())
    tests = [ROOT / path for path in tree() if path.startswith("tests/")]
    python = [path for path in tests if path.suffix == ".py" and path.exists()]
    assert set(files) - {path.name for path in python} == set()
    known = {name for path in python for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert [name for name in named if not any(each.startswith(name) for each in known)] == []
    assert len(named) > 40


def test_every_name_of_the_code_that_a_contributor_is_told_of_is_there() -> None:
    named = re.findall(r"`(_?[A-Za-z]\w+)(?:\(\w+\))?`", CONTRIBUTING.read_text())
    sources = [ROOT / path for path in tree() if path.endswith(".py")]
    words = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
    assert set(named) - words == set()
    assert len(named) > 20
