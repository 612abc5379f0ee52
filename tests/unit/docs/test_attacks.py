"""Each law of tests/data/attacks.md has its test, and each promise of SECURITY.md a law."""

import ast
import re
from functools import cache
from typing import NamedTuple

import pytest

from tests.helpers.documents import ROOT

PAGE = ROOT / "tests" / "data" / "attacks.md"
NAMED = re.compile(r"\(((?:`[a-z0-9-]+`(?:, )?)+)\)")  # laws, behind what they hold
TEST = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


class Law(NamedTuple):
    id: str
    words: str
    test: str
    attack: str


def laws() -> list[Law]:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [Law(*(cell.strip() for cell in row.strip("|").split(" | "))) for row in rows]


@cache
def functions_of(path: str) -> set[str]:
    file = ROOT / "tests" / path
    nodes = ast.parse(file.read_text()).body if file.exists() else []
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def lacks(law: Law) -> list[str]:
    """Say what a row lacks: a law without a test cannot be written."""
    found = TEST.fullmatch(law.test)
    rows = {
        "an id": re.fullmatch(r"`[a-z0-9-]+`", law.id),
        "a sentence": law.words.endswith("."),
        "a test that is there, as `path.py::test_name`": found
        and found[2] in functions_of(found[1]),
        "an attack": law.attack,
    }
    return [name for name, is_there in rows.items() if not is_there]


def test_every_law_has_a_test_that_is_there_and_an_attack() -> None:
    assert {law.id: lacks(law) for law in laws() if lacks(law)} == {}
    assert len(laws()) > 200


def test_no_two_laws_have_one_name() -> None:
    ids = [law.id for law in laws()]
    assert sorted(ids) == sorted(set(ids))


@pytest.mark.parametrize(
    "test", ["", "test_attacks.py", "gone.py::test_x", "unit/docs/test_attacks.py::test_gone"]
)
def test_a_law_without_a_test_would_be_seen(test: str) -> None:
    assert len(lacks(Law("`a-law`", "It holds.", f"`{test}`", "somebody tries"))) == 1


def test_every_promise_of_the_threat_model_names_its_laws() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    held = page.split("## What holds")[1].split("\n## ")[0]
    promises = [" ".join(each.split()) for each in re.split(r"\n- ", held)[1:]]
    assert [each for each in promises if not NAMED.search(each)] == []
    assert len(promises) > 40
    named = {name for found in NAMED.findall(" ".join(page.split())) for name in found.split(", ")}
    assert named - {law.id for law in laws()} == set()
