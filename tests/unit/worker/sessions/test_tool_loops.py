"""A prompt only ever grows, and a result has its call's id: tool loops of every family."""

from collections.abc import Iterator

import pytest

from tests.helpers.families.family_cases import family_names
from tests.helpers.families.real_templates import NEEDS_REAL_TEMPLATES
from tests.helpers.families.real_tokenizers import SOURCE_OF
from tests.helpers.families.tool_loops import CUTS, LoopDesk, ToolLoop, desk_of


def faults(desk: LoopDesk) -> Iterator[str]:
    """Yield what is wrong: each way to cut, half of the time with a client that keeps all."""
    for number, cut in enumerate(CUTS):
        for lead in (ToolLoop.lead, ToolLoop.lead_pairs):
            loop = ToolLoop(desk, cut)
            lead(loop, keeps=(lead is ToolLoop.lead) == bool(number % 2))
            yield from (f"{lead.__name__} {cut}: {fault}" for fault in loop.wrong)


@pytest.mark.parametrize("name", family_names(is_real=False))
def test_what_was_sampled_stands_in_a_tool_loop(name: str) -> None:
    assert not [*faults(desk_of(name))]


@NEEDS_REAL_TEMPLATES
@pytest.mark.parametrize("name", family_names(is_real=True))
def test_what_was_sampled_stands_behind_the_makers_template(name: str) -> None:
    assert not [*faults(desk_of(name))]


@NEEDS_REAL_TEMPLATES
@pytest.mark.parametrize("name", SOURCE_OF)
def test_what_was_sampled_stands_as_the_makers_tokenizer_cuts_it(name: str) -> None:
    assert not [*faults(desk_of(name, is_real=True))]
