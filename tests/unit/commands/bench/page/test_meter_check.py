"""The page says where the meter and a server do not agree; it is silent where they cannot."""

import pytest

from hearth.commands.bench.page.meter_check import counted_otherwise
from hearth.commands.bench.page.page_lines import PageLines
from tests.helpers.bench.flat_results import flat_results


def told(workload: str = "sub-agents", **changed: float) -> list[str]:
    values = {"read_tokens": 1_000.0, "claimed_tokens": 1_000.0, "prompt_tokens": 9_000.0}
    made = flat_results({("m", "other", workload): [values | changed] * 3})
    return list(counted_otherwise(PageLines(made)))


def test_counts_that_are_alike_are_no_remark() -> None:
    assert told() == told(read_tokens=1_040) == told(read_tokens=960) == []


def test_more_than_a_server_says_is_padding_and_less_may_be_unseen() -> None:
    (more,) = told(read_tokens=1_470)
    assert "other: the meter counts 1.47 times what it says itself in sub-agents." in more
    assert "padding" in more
    (mute,) = told(read_tokens=9_900, claimed_tokens=9_000)  # more than all of its prompts
    assert "1.10 times" in mute
    (less,) = told(read_tokens=800)
    assert "counts 0.80 times" in less
    assert "flatter it" in less


@pytest.mark.parametrize(
    "changed",
    [
        {"claimed_tokens": 9_000.0},  # it never says what it found in its cache
        {"failed": 1.0, "read_tokens": 2_000.0},
        {"read_tokens": 100.0, "claimed_tokens": 150.0},
        {"read_tokens": 2_000.0, "claimed_tokens": 0.0},
    ],
)
def test_what_says_nothing_of_the_meter_is_no_remark(changed: dict[str, float]) -> None:
    assert told(**changed) == []


def test_what_is_read_for_nobody_is_claimed_by_nobody() -> None:
    assert told("cancel-0s", read_tokens=2_000) == []
