"""A prompt only ever grows, and a result has its call's id: tool loops of every family."""

from collections.abc import Iterator

import pytest

from scripts.nightly.sources import FetchError
from tests.helpers.families.family_cases import family_names, written_family
from tests.helpers.families.real_templates import NEEDS_REAL_TEMPLATES
from tests.helpers.families.real_tokenizers import SOURCE_OF
from tests.helpers.families.tool_loops import CUTS, PromptSide, ToolLoop, real_side


def side_of(name: str) -> PromptSide:
    """Return a family's prompt side, with a small tokenizer of ours."""
    try:
        return PromptSide(written_family(name))
    except FetchError as error:
        pytest.skip(f"the package index has no templates: {error}")


def faults(side: PromptSide) -> Iterator[str]:
    """Yield what is wrong: each way to cut, half of the time with a client that keeps all."""
    for number, cut in enumerate(CUTS):
        for leads in (ToolLoop.lead, ToolLoop.lead_pairs):
            keeps = (leads is ToolLoop.lead) == bool(number % 2)
            loop = ToolLoop(side, cut)
            leads(loop, keeps)
            yield from (f"{leads.__name__} {cut}: {fault}" for fault in loop.faults())


@pytest.mark.parametrize("name", family_names(is_real=False))
def test_what_was_sampled_stands_in_a_tool_loop(name: str) -> None:
    assert not [*faults(side_of(name))]


@NEEDS_REAL_TEMPLATES
@pytest.mark.parametrize("name", family_names(is_real=True))
def test_what_was_sampled_stands_behind_the_makers_template(name: str) -> None:
    assert not [*faults(side_of(name))]


@NEEDS_REAL_TEMPLATES
@pytest.mark.parametrize("name", SOURCE_OF)
def test_what_was_sampled_stands_as_the_makers_tokenizer_cuts_it(name: str) -> None:
    assert not [*faults(real_side(name))]
