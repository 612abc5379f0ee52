"""Each family's own words are read as docs/formats.md tells, behind the family's own prompts."""

import pytest

from scripts.nightly.sources import FetchError
from tests.helpers.families.families_table import LEFT, is_in_full, line_of, lines
from tests.helpers.families.family_cases import family_names, written_family
from tests.helpers.families.family_checks import FamilyChecks

AGAIN = "python -m tests.helpers.families.families_table writes the page anew"


@pytest.mark.parametrize("name", family_names(is_real=False))
def test_a_family_is_read_as_the_page_tells(name: str) -> None:
    checks = FamilyChecks(written_family(name))
    assert line_of(name, checks.cells()) == lines()[name], (AGAIN, checks.faults)


@pytest.mark.night
@pytest.mark.parametrize("name", family_names(is_real=True))
def test_a_family_is_read_behind_its_makers_template(name: str) -> None:
    try:
        checks = FamilyChecks(written_family(name))
    except FetchError as error:
        pytest.skip(f"the package index has no templates: {error}")
    assert line_of(name, checks.cells()) == lines()[name], (AGAIN, checks.faults)


def test_the_page_has_every_family_and_a_reason_where_one_is_not_read_in_full() -> None:
    assert sorted(lines()) == sorted(family_names(is_real=False) + family_names(is_real=True))
    assert {name for name, line in lines().items() if not is_in_full(line)} == LEFT.keys(), AGAIN
