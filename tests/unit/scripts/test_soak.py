"""The soak's verdicts, from samples that are given by hand, and what its requests ask."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence

import pytest

from scripts import soak_requests
from scripts.chaos.request_bodies import malformed
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


# ---------------------------------------------------------------- by requests


def rounds(
    rss: Sequence[float], files: Sequence[int] = (), threads: Sequence[int] = ()
) -> list[soak_requests.Held]:
    return [
        soak_requests.Held(
            250 * (number + 1),
            number * 10.0,
            int(each * MB),
            files[number] if files else 20,
            threads[number] if threads else 10,
        )
        for number, each in enumerate(rss)
    ]


def test_growth_is_the_slope_of_the_second_half() -> None:
    assert soak_requests.growth_of(rounds([10, 50, 90, 100, 101, 102, 103, 104]), "rss") == 4 * MB
    assert soak_requests.growth_of(rounds([10, 50, 90, 100, 100, 100, 100, 100]), "rss") == 0


@pytest.mark.parametrize("rise", [2, 2 / 3])
def test_memory_that_rises_by_more_than_one_percent_is_a_miss(rise: float) -> None:
    held = {"worker": rounds([50] * 3 + [100 + rise * at / 5 for at in range(6)])}
    found = list(soak_requests.misses(held, {}))
    assert [text for text in found if "resident memory grew" in text] == found
    assert len(found) == (rise > 1)


def test_one_high_round_is_no_growth() -> None:
    assert not list(soak_requests.misses({"worker": rounds([100] * 15 + [103] + [100] * 14)}, {}))


@pytest.mark.parametrize(("what", "most"), [("files", 2), ("threads", 5)])
def test_files_may_rise_by_two_and_threads_by_five(what: str, most: int) -> None:
    def found(rise: int) -> list[str]:
        risen = [10 + rise * max(0, at - 4) // 4 for at in range(9)]
        held = rounds([100] * 9, **{what: risen})  # type: ignore[arg-type]
        return list(soak_requests.misses({"proxy": held}, {}))

    assert not found(most)
    (miss,) = found(2 * most)
    assert f"proxy: {what} grew by" in miss


def test_a_process_that_is_not_there_all_the_time_is_a_miss() -> None:
    held = {"proxy": rounds([100] * 8), "worker 7": rounds([100] * 7)}
    assert list(soak_requests.misses(held, {"an answer without an end": 2})) == [
        "worker 7 was not there all the time",
        "2 times: an answer without an end",
    ]


def test_too_few_requests_are_told_before_a_server_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert asyncio.run(soak_requests.soak(999, 4, 1)) == 2
    assert "999 requests are too few to tell. Send 1,000 at least." in capsys.readouterr().out


def test_what_is_asked_is_drawn_from_a_finite_set() -> None:
    """So what is remembered of it comes to its bound."""
    traffic = soak_requests.Traffic(1, seed=1)
    wrong = {content for _, _, content in malformed()}
    contents = {content_of(traffic.next().payload) for _ in range(6_000)}
    asked = set(map(prompt_of, contents - wrong - {b""}))
    assert (
        soak_requests.FRESH / 2
        < len(asked)
        <= soak_requests.TALKS * (soak_requests.PAGES + 2) + soak_requests.FRESH
    )


def content_of(payload: bytes) -> bytes:
    return payload.partition(b"\r\n\r\n")[2]


def prompt_of(content: bytes) -> str:
    """Return a body without how long the answer may be and how it is sent."""
    body = json.loads(content)
    options = {"stream", "max_tokens", "max_output_tokens"}
    return repr([body[name] for name in body if name not in options])
