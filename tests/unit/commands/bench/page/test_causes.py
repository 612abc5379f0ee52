"""Causes that people write beside the figures."""

import pytest

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.page.causes import Causes

TEXT = """# Why Hearth is behind

A word before the first section is nobody's cause.

## linear / memory_bytes
Hearth is two processes. `litellm` takes
263 MB of them.

It would take a front without it.
## * / memory
The proxy.

## cancel-0s / tokens read
Chance.
"""
MEMORY = MEASURES["memory_bytes"]


def test_a_section_is_a_workload_and_a_measure_by_name_or_label() -> None:
    causes = Causes.parsed(TEXT)
    assert causes.of("linear", MEMORY) == (
        "Hearth is two processes. `litellm` takes 263 MB of them.",
        "It would take a front without it.",
    )
    assert causes.of("live", MEMORY) == ("The proxy.",)
    assert causes.of("cancel-0s", MEASURES["read_tokens"]) == ("Chance.",)
    assert causes.of("linear", MEASURES["cpu_s"]) == ()
    assert causes.first_line("linear", MEMORY) == "Hearth is two processes."
    assert causes.first_line("linear", MEASURES["cpu_s"]) == ""


def test_causes_of_lines_that_are_not_behind_are_told() -> None:
    causes = Causes.parsed(TEXT)
    assert causes.unused([("live", "memory_bytes")]) == [
        "linear / memory_bytes",
        "cancel-0s / read_tokens",
    ]


@pytest.mark.parametrize("heading", ["## linear", "## linear / nonsense"])
def test_a_section_of_no_line_is_refused(heading: str) -> None:
    with pytest.raises(ValueError, match="linear"):
        Causes.parsed(f"{heading}\nText.\n")


@pytest.mark.parametrize("heading", [f"## {' ' * 20_000}x", f"## a{' / ' * 20_000}", "## / /"])
def test_a_heading_of_any_length_is_refused_at_once(heading: str) -> None:
    """A pattern took seconds for 3,000 blanks, and eight times as long for twice as many."""
    with pytest.raises(ValueError) as caught:
        Causes.parsed(heading)
    assert len(str(caught.value)) < 1_500
