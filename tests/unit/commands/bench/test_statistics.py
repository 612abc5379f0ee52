"""Lines and standings follow from values, and chance is told from difference."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.results import Results
from hearth.commands.bench.statistics import (
    Line,
    Standing,
    comparisons,
    line,
    lines,
    mann_whitney,
    moved,
    read_over,
    standing,
)
from tests.helpers.bench.flat_results import flat_results

CPU = MEASURES["cpu_s"]
SMALL = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=5)


def made(values: Sequence[float], *, is_fair: bool = True) -> Line:
    return Line(tuple(values), is_fair)


# ---------------------------------------------------------------- the test


def wins(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Mann and Whitney's U, by pairs: how often `one` is the greater, ties by halves."""
    return sum((a > b) + (a == b) / 2 for a in one for b in other)


def by_all_partitions(one: Sequence[float], other: Sequence[float]) -> float:
    values = [*one, *other]
    middle = len(one) * len(other) / 2
    far = abs(wins(one, other) - middle)
    places = set(range(len(values)))
    distances = [
        abs(wins([values[i] for i in drawn], [values[i] for i in places - set(drawn)]) - middle)
        for drawn in itertools.combinations(range(len(values)), len(one))
    ]
    return sum(each >= far for each in distances) / len(distances)


@given(SMALL, SMALL)
def test_the_probability_is_that_over_all_ways_to_part_the_values(
    one: list[float], other: list[float]
) -> None:
    assert math.isclose(mann_whitney(one, other), by_all_partitions(one, other))


# ---------------------------------------------------------------- lines


def test_a_line_has_the_rounds_that_have_a_value() -> None:
    rounds = [{"cpu_s": 3.0}, {}, {"cpu_s": 1.0}, {"cpu_s": 2.0}]
    found = line(flat_results({("m", "hearth", "w"): rounds}), "m", "hearth", "w", "cpu_s")
    assert found is not None and (found.values, found.median) == ((3.0, 1.0, 2.0), 2.0)


def test_what_was_read_stands_over_the_ideal_that_hearth_tells() -> None:
    read = {"read_tokens": 300.0, "prompt_tokens": 1_200.0}
    results = flat_results(
        {
            ("m", "hearth", "w"): [{"read_tokens": 110.0, "ideal_tokens": 100.0}] * 2,
            ("m", "other", "w"): [read, read | {"read_tokens": 330.0}],
            ("n", "other", "w"): [read],
        }
    )
    assert read_over(results, "m", "hearth", ("w",), "ideal_tokens") == 1.1
    assert read_over(results, "m", "other", ("w",), "ideal_tokens") == pytest.approx(3.15)
    assert read_over(results, "m", "other", ("w",), "prompt_tokens") == pytest.approx(0.2625)
    assert read_over(results, "n", "other", ("w",), "ideal_tokens") is None  # Hearth played it not


def test_answers_are_compared_with_those_of_the_start_without_a_cache() -> None:
    results = flat_results({("m", "hearth", "w"): [{}]})
    results.put(("m", "hearth", "answers"), 0, {}, ("a", "b", ""))
    results.put(("m", "hearth", "answers"), 1, {}, ("a", "x", "c"))
    assert line(results, "m", "hearth", "answers", "same_answers") is None
    results.put(("m", "hearth", "answers-cold"), 0, {}, ("a", "b", "c"))
    found = line(results, "m", "hearth", "answers", "same_answers")
    assert found is not None and found.values == (1.0, 2 / 3)


# ---------------------------------------------------------------- comparing


def test_lines_are_told_apart_by_more_than_chance_and_by_enough() -> None:
    ones, twos = made([1.0] * 5), made([2.0] * 5)
    assert standing(ones, twos, CPU) is Standing.WORSE
    assert standing(twos, ones, CPU) is Standing.BETTER
    for same in ([1.01, 1.02, 1.03, 1.04, 1.03], [2.0] * 3 + [0.5, 0.6]):  # `least`; overlap
        assert standing(ones, made(same), CPU) is Standing.SAME
    assert standing(made([1.0] * 3), made([2.0] * 3), CPU) is Standing.SAME  # too few rounds
    assert standing(ones, twos, MEASURES["tokens_s"]) is Standing.BETTER  # more is better


def test_a_line_that_is_no_fair_one_is_not_compared() -> None:
    ones, twos = made([1.0] * 5, is_fair=False), made([2.0] * 5)
    assert standing(ones, twos, CPU) is standing(twos, ones, CPU) is Standing.OTHER


@pytest.mark.parametrize(
    ("values", "measure", "is_fair"),
    [
        ({"failed": 0.0}, "tokens_s", True),
        ({"failed": 1.0}, "tokens_s", False),
        ({"valid_share": 0.75}, "tokens_s", False),  # other text is other work
        ({"valid_share": 0.75}, "valid_share", True),
        ({"valid_share": 1.0}, "tokens_s", True),
    ],
)
def test_failed_requests_and_answers_that_do_not_obey_make_no_fair_line(
    values: dict[str, float], measure: str, is_fair: bool
) -> None:
    results = flat_results({("m", "hearth", "w"): [{"tokens_s": 10.0, **values}] * 5})
    found = line(results, "m", "hearth", "w", measure)
    assert found is not None and found.is_fair is is_fair


def test_each_other_server_is_compared_by_what_has_a_better_way() -> None:
    values = {"cpu_s": 2.0, "prompt_tokens": 5.0}
    results = flat_results(
        {
            ("m", "hearth", "w"): [values] * 5,
            ("m", "other", "w"): [{**values, "cpu_s": 1.0}] * 5,
            ("m", "other", "alone"): [values] * 5,
        }
    )
    (found,) = comparisons(results)
    assert (found.workload, found.server, found.measure) == ("w", "other", CPU)
    assert found.standing is Standing.BETTER and found.own.median == 2.0


def run_of(values: Sequence[float]) -> Results:
    return flat_results({("m", "hearth", "w"): [{"cpu_s": value} for value in values]})


@pytest.mark.parametrize(
    ("before", "after", "is_moved"),
    [
        ([1.0, 1.1, 1.2], [1.3, 1.4, 1.5], True),
        ([1.0, 1.1, 1.2], [1.15, 1.4, 1.5], True),  # the ranges may overlap
        ([1.0, 1.1, 1.5], [1.3, 1.4, 1.5], False),  # within what the first run saw
        ([1.3, 1.4, 1.5], [1.0, 1.1, 1.5], False),
        ([1.0, 1.0, 1.0], [1.01, 1.01, 1.01], False),  # less than `least`
    ],
)
def test_a_line_moved_when_each_median_is_outside_the_other_run(
    before: list[float], after: list[float], is_moved: bool
) -> None:
    told, count = moved(run_of(before), run_of(after))
    assert told == ["m, hearth, w: CPU seconds 1.1 -> 1.4 s"] * is_moved and count == 1


def test_all_lines_are_those_that_are_found_one_by_one() -> None:
    results = flat_results(
        {
            (model, server, workload): [{"read_tokens": 300.0, "ideal_tokens": 200.0}]
            for model in ("m", "n")
            for server in ("hearth", "other")
            for workload in ("v", "w")
        }
    )
    found = lines(results)
    assert len(found) == 8 * 2
    assert all(line(results, *key) == each for key, each in found.items())
