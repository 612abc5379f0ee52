"""Lines and standings follow from samples, and chance is told from difference."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.page.page_lines import PageLines, Standing
from hearth.commands.bench.rank_test import mann_whitney
from hearth.commands.bench.results import Results, Sample, ServerFacts
from hearth.commands.bench.statistics import (
    Line,
    line,
    line_of,
    lines,
    moved,
    paired,
    same_answers,
    told_apart,
)
from tests.helpers.bench.flat_results import flat_results

CPU = MEASURES["cpu_s"]
SMALL = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=5)
VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)


def made(values: Sequence[float], failed: int = 0) -> Line:
    found = line_of(values, failed=failed)
    assert found is not None
    return found


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


@settings(max_examples=60)
@given(SMALL, SMALL)
def test_the_probability_is_that_over_all_ways_to_part_the_values(
    one: list[float], other: list[float]
) -> None:
    assert math.isclose(mann_whitney(one, other), by_all_partitions(one, other))


@given(VALUES, VALUES)
def test_the_probability_does_not_depend_on_order_sides_or_scale(
    one: list[float], other: list[float]
) -> None:
    found = mann_whitney(one, other)
    assert 0 < found <= 1
    assert found == mann_whitney(other, one) == mann_whitney(one[::-1], sorted(other))
    assert found == mann_whitney([-each for each in one], [-each for each in other])


@pytest.mark.parametrize(
    ("one", "other", "p"),
    [
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252),
        ([1, 2, 3, 4], [5, 6, 7, 8], 2 / 70),
        ([1, 2, 3], [4, 5, 6], 2 / 20),  # three rounds tell nothing
        ([1] * 5, [1] * 5, 1),
        ([1] * 5, [2] * 5, 2 / 252),
        ([], [1], 1),
    ],
)
def test_known_probabilities(one: list[float], other: list[float], p: float) -> None:
    assert mann_whitney(one, other) == pytest.approx(p)


# ---------------------------------------------------------------- lines


@given(VALUES)
def test_a_line_holds_its_values_in_order(values: list[float]) -> None:
    found = made(values)
    assert found.low <= found.median <= found.high
    assert found.values == tuple(values)


def test_a_line_of_nothing_is_none() -> None:
    assert line_of([]) is None
    assert line(flat_results({("m", "hearth", "w"): [{}]}), "m", "hearth", "w", "cpu_s") is None


def test_what_was_read_stands_over_the_ideal_that_hearth_tells() -> None:
    read = {"read_tokens": 300.0, "prompt_tokens": 1_200.0}
    results = flat_results(
        {
            ("m", "hearth", "w"): [{"read_tokens": 110.0, "ideal_tokens": 100.0}] * 2,
            ("m", "other", "w"): [read, read | {"read_tokens": 330.0}],
            ("n", "other", "w"): [read],
        }
    )

    def values(model: str, server: str, measure: str) -> tuple[float, ...] | None:
        found = line(results, model, server, "w", measure)
        return found and found.values

    assert values("m", "hearth", "read_over_ideal") == (1.1, 1.1)
    assert values("m", "other", "read_over_ideal") == (3.0, 3.3)
    assert values("m", "other", "read_per_prompt") == (0.25, 0.275)
    assert values("m", "hearth", "read_per_prompt") is None
    assert values("n", "other", "read_over_ideal") is None  # Hearth did not play it


def test_few_tokens_over_an_ideal_of_hardly_any_are_no_ratio() -> None:
    results = flat_results({("m", "hearth", "w"): [{"read_tokens": 9.0, "ideal_tokens": 1.0}]})
    assert line(results, "m", "hearth", "w", "read_over_ideal") is None


def test_without_a_meter_what_the_server_says_stands_there_and_is_marked() -> None:
    claims = {"claimed_tokens": 50.0, "prompt_tokens": 100.0}
    results = flat_results(
        {
            ("m", "hearth", "w"): [claims | {"read_tokens": 60.0}],
            ("m", "by-url", "w"): [claims],
            ("m", "filled-in", "w"): [claims | {"read_tokens": 50.0}],
        }
    )
    results.servers["filled-in"] = ServerFacts("filled-in", "1", "", is_metered=False)
    shares = {
        server: line(results, "m", server, "w", "read_per_prompt") for server in results.servers
    }
    assert {name: found and found.median for name, found in shares.items()} == {
        "hearth": 0.6,
        "by-url": 0.5,
        "filled-in": 0.5,
    }
    marked = [name for name, found in shares.items() if found and found.is_claimed]
    assert marked == ["by-url", "filled-in"]


DIGESTS = st.lists(st.sampled_from(("", "a", "b")), max_size=6)


@given(DIGESTS, DIGESTS)
def test_the_share_of_same_answers_counts_those_that_both_gave(
    warm: list[str], cold: list[str]
) -> None:
    share = same_answers(warm, cold)
    given_by_both = sum(bool(one and other) for one, other in zip(warm, cold, strict=False))
    if share is None:
        assert given_by_both == 0
    else:
        same = sum(one == other != "" for one, other in zip(warm, cold, strict=False))
        assert share * given_by_both == pytest.approx(same)


def test_answers_are_compared_with_those_of_the_start_without_a_cache() -> None:
    results = flat_results({("m", "hearth", "answers"): [{}]})
    results.samples = [
        Sample("m", "hearth", "answers", 0, {}, ("a", "b")),
        Sample("m", "hearth", "answers", 1, {}, ("a", "x")),
        Sample("m", "hearth", "answers-cold", 0, {}, ("a", "b")),
    ]
    found = line(results, "m", "hearth", "answers", "same_answers")
    assert found and found.values == (1.0, 0.5)
    assert line(results, "m", "hearth", "answers-cold", "same_answers") is None


# ---------------------------------------------------------------- comparing


def test_lines_are_told_apart_by_more_than_chance_and_by_enough() -> None:
    ones, twos = made([1.0] * 5), made([2.0] * 5)
    assert told_apart(ones, twos, CPU)
    assert not told_apart(ones, made([1.01, 1.02, 1.03, 1.04, 1.03]), CPU)  # less than `least`
    assert not told_apart(ones, made([2.0] * 3 + [0.5, 0.6]), CPU)  # overlap
    assert not told_apart(made([1.0] * 2), made([2.0] * 2), CPU)  # two rounds tell nothing


def test_a_server_that_failed_requests_is_not_told_to_have_read_less() -> None:
    ones, twos = made([1.0] * 5, failed=1), made([2.0] * 5)
    assert not told_apart(ones, twos, CPU)
    assert not told_apart(twos, ones, MEASURES["read_tokens"])
    assert told_apart(twos, ones, MEASURES["failed"])


@pytest.mark.parametrize(
    ("measure", "own", "other", "expected"),
    [
        ("cpu_s", 1.0, 2.0, Standing.WORSE),
        ("cpu_s", 2.0, 1.0, Standing.BETTER),
        ("tokens_s", 20.0, 10.0, Standing.WORSE),
        ("tokens_s", 10.0, 20.0, Standing.BETTER),
        ("tokens_s", 10.0, 10.4, Standing.SAME),
        ("prompt_tokens", 10.0, 20.0, None),  # told, not compared
    ],
)
def test_another_server_stands_better_or_worse_than_hearth(
    measure: str, own: float, other: float, expected: Standing | None
) -> None:
    results = flat_results(
        {
            ("m", "hearth", "w"): [{measure: own}] * 5,
            ("m", "other", "w"): [{measure: other}] * 5,
        }
    )
    found = PageLines(results)
    assert found.standing("m", "other", "w", MEASURES[measure]) == expected
    assert found.standing("m", "absent", "w", MEASURES[measure]) is None


def failing(machine: str, rounds: Sequence[dict[str, float]]) -> Results:
    """Return a run in which Hearth answers and obeys, and another server does what is given."""
    good = {"requests": 4.0, "failed": 0.0, "valid_share": 1.0, "tokens_s": 20.0}
    results = flat_results({("m", "hearth", "w"): [good] * 5, ("m", "other", "w"): rounds})
    results.machine = machine
    return results


@pytest.mark.parametrize(
    ("machine", "answered", "expected"),
    [
        ("AMD EPYC, 2 cores, 8 GiB, Linux x86_64", [0.0] * 5, Standing.FAILED),
        ("AMD EPYC, 2 cores, 8 GiB, Linux x86_64", [0.0, 0.0, 1.0, 0.0, 0.0], Standing.WORSE),
        ("Apple M3 Max, 64 GiB, macOS 15", [0.0] * 5, Standing.WORSE),
    ],
)
def test_who_answers_nothing_without_metal_is_not_held_to_have_failed(
    machine: str, answered: list[float], expected: Standing
) -> None:
    rounds = [{"requests": each, "failed": 4 - each, "valid_share": 0.0} for each in answered]
    results = failing(machine, rounds)
    assert PageLines(results).standing("m", "other", "w", MEASURES["failed"]) == expected
    assert PageLines(results).standing("m", "other", "w", MEASURES["valid_share"]) == expected


@pytest.mark.parametrize(("share", "expected"), [(1.0, Standing.WORSE), (0.75, Standing.FAILED)])
def test_speeds_of_answers_to_a_schema_are_compared_where_all_obey(
    share: float, expected: Standing
) -> None:
    rounds = [{"requests": 4.0, "failed": 0.0, "valid_share": share, "tokens_s": 10.0}] * 5
    results = failing("a machine", rounds)
    assert PageLines(results).standing("m", "other", "w", MEASURES["tokens_s"]) == expected


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
    found = moved(run_of(before), run_of(after))
    assert [(each.workload, each.measure) for each in found] == [("w", "cpu_s")] * is_moved
    assert all(each.before.values == tuple(before) for each in found)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_a_run_has_not_moved_from_itself(values: list[float]) -> None:
    assert moved(run_of(values), run_of(values)) == []
    assert moved(run_of(values), flat_results({("m", "hearth", "w"): [{}]})) == []


def test_what_is_derived_of_tokens_does_not_move_beside_them() -> None:
    def run(read: float) -> Results:
        values = {"read_tokens": read, "ideal_tokens": 200.0, "prompt_tokens": 400.0}
        return flat_results({("m", "hearth", "w"): [values]})

    assert [each.measure for each in moved(run(300.0), run(400.0))] == ["read_tokens"]
    pairs = paired(run(300.0), run(400.0))
    assert {each.measure for each in pairs} == {"read_tokens", "ideal_tokens", "prompt_tokens"}


def test_all_lines_are_found_those_that_follow_too() -> None:
    values = {"read_tokens": 300.0, "ideal_tokens": 200.0, "prompt_tokens": 400.0}
    results = flat_results({("m", "hearth", "w"): [values]})
    found = {(key[3], key[4].median) for key in lines(results)}
    assert found == {*values.items(), ("read_over_ideal", 1.5), ("read_per_prompt", 0.75)}


def test_all_lines_are_those_that_are_found_one_by_one() -> None:
    results = flat_results(
        {
            (model, server, workload): [{"read_tokens": 300.0, "ideal_tokens": 200.0}]
            for model in ("m", "n")
            for server in ("hearth", "other")
            for workload in ("answers", "w")
        }
    )
    results.samples += [
        Sample("m", "hearth", "answers", 1, {}, ("a",)),
        Sample("m", "hearth", "answers-cold", 0, {}, ("a",)),
    ]
    found = {row[:4]: row[4] for row in lines(results)}
    assert len(found) == 8 * 3 + 1
    assert all(line(results, *key) == each for key, each in found.items())
