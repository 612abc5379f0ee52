"""The soak's verdict, from samples that are given by hand."""

from collections import Counter

import pytest

from scripts.soak import Sample, growths, lines, misses

MB = 1_000_000
COUNTS = Counter(answered=10)


def samples(*rss: float, kv: int = 5, disk: int = 7) -> list[Sample]:
    return [
        Sample(number * 5.0, {"proxy": int(each * MB)}, kv, 10, 3, disk, 20, 0, 1)
        for number, each in enumerate(rss)
    ]


def test_growth_in_the_first_third_is_warm_up() -> None:
    rising = [100, 200, 300, 400, 500, 600, 700, 800, 900, 1_000]
    assert not misses(samples(*rising, *[1_000] * 20), COUNTS)


def test_growth_after_it_is_told_from_2_percent_on() -> None:
    assert not misses(samples(*[100] * 20, *[101.9] * 10), COUNTS)
    (miss,) = misses(samples(*[100] * 20, *[102.1] * 10), COUNTS)
    assert "proxy grew by 2.1%" in miss


def test_a_moments_peak_is_no_growth_and_is_told() -> None:
    seen = samples(*[100] * 25, 300, *[100] * 4)
    assert not misses(seen, COUNTS)
    assert growths(seen)[0].peak == 300 * MB and "300.0" in lines(seen, COUNTS)[0]


def test_kv_above_its_budget_is_a_miss_at_once() -> None:
    assert misses([*samples(*[1] * 29), *samples(1, kv=11)], COUNTS)
    assert misses([*samples(*[1] * 29), *samples(1, disk=21)], COUNTS)
    assert not misses([*samples(*[1] * 29), *samples(1, kv=10, disk=20)], COUNTS)


def test_a_process_that_ended_or_a_request_that_failed_is_a_miss() -> None:
    seen = samples(*[1] * 30)
    seen[9].rss["worker 7"] = 5
    assert "ended" in misses(seen, COUNTS)[0]
    assert misses(samples(*[1] * 30), Counter(answered=1, failed=1))
    assert misses(samples(*[1] * 30), Counter())


def test_too_few_samples_tell_nothing() -> None:
    with pytest.raises(ValueError, match="too few"):
        growths(samples(1, 1))
