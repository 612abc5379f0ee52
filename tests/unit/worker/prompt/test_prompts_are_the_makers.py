"""Prompts are what the makers' templates make of them, or docs/prompts.md tells why not."""

from typing import Any

import pytest

from scripts.nightly.sources import FetchError
from tests.helpers.families.family_cases import FAMILIES
from tests.helpers.prompts.conversations import IN_DIALECTS
from tests.helpers.prompts.prompt_checks import EQUAL, NEITHER, PromptChecks
from tests.helpers.prompts.prompts_table import OWN, PAGE, line_of, lines, sources, with_lists

AGAIN = "python -m tests.helpers.prompts.prompts_table writes the lists anew"


def own(name: str) -> PromptChecks:
    return PromptChecks(name, (FAMILIES / name).read_text())


@pytest.mark.parametrize("name", OWN)
def test_prompts_are_what_the_page_tells(name: str) -> None:
    assert line_of(name, own(name).found) == lines()[name], AGAIN


@pytest.mark.night
@pytest.mark.parametrize("name", sorted(lines().keys() - set(OWN)))
def test_prompts_are_those_of_the_makers_template(name: str) -> None:
    try:
        source = sources()[name]
    except FetchError as error:
        pytest.skip(f"the package index has no templates: {error}")
    checks = PromptChecks(name, source)
    assert line_of(name, checks.found) == lines()[name], (AGAIN, checks.found)


def test_the_page_counts_what_its_lines_tell() -> None:
    page = PAGE.read_text()
    assert with_lists(page, list(lines().values())) == page, AGAIN
    assert len(lines()) == 72


@pytest.mark.parametrize("name", sorted(path.name for path in FAMILIES.glob("*.jinja")))
def test_a_template_of_ours_shows_what_transformers_would(name: str) -> None:
    checks = own(name)
    found = {each: checks.kind(each) for each in IN_DIALECTS if "/" not in each}  # no switches
    assert [each for each, kind in found.items() if kind == NEITHER] == []


def test_a_prompt_that_has_one_token_less_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = own(OWN[0])
    built: Any = checks.ids
    assert checks.kind("su") == EQUAL
    monkeypatch.setattr(checks, "ids", lambda prompt: built(prompt)[:-1])
    assert checks.kind("su") == NEITHER
