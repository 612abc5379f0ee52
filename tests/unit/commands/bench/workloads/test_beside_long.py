"""Gaps beside a long prompt are those that touch its reading, a stall over all of it included."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from hearth.commands.bench.measures import MEASURES
from hearth.commands.bench.workloads.beside_long import (
    StreamBeside,
    gap_values,
    gaps_within,
    measured_of,
    words,
)
from hearth.commands.bench.workloads.timed_stream import TimedAnswer, TimedClient

times = st.lists(st.integers(0, 60), min_size=2, max_size=30, unique=True).map(sorted)


@given(times, st.integers(0, 60), st.integers(1, 20))
def test_the_gaps_of_a_span_are_those_that_share_a_moment_with_it(
    arrivals: list[int], began: int, length: int
) -> None:
    found = gaps_within(arrivals, began, began + length)
    moments = [began + part + 0.5 for part in range(length)]
    expected = [
        later - earlier
        for earlier, later in pairwise(arrivals)
        if any(earlier < moment < later for moment in moments)
    ]
    assert found == expected


def test_a_server_that_stops_its_streams_is_seen() -> None:
    before = [0.1 * number for number in range(11)]  # until 1.0
    stalled = [*before, 9.0, 9.1]
    values = gap_values([stalled, stalled, stalled], sent_s=1.0, first_s=8.9)
    assert values["gap_p50_s"] == values["gap_p99_s"] == pytest.approx(8.0)
    assert values["gap_over_alone"] == pytest.approx(80.0)


def test_streams_that_lose_nothing_have_the_gaps_of_before() -> None:
    steady = [0.1 * number for number in range(100)]
    values = gap_values([steady] * 3, sent_s=2.0, first_s=7.0)
    assert values["gap_over_alone"] == pytest.approx(1.0)
    assert values["gap_p50_s"] == pytest.approx(0.1)


def test_without_streams_there_are_no_gaps() -> None:
    assert gap_values([[], [1.0]], 2.0, 3.0) == {}


def test_what_went_wrong_is_told_and_no_time_of_a_prompt_that_failed() -> None:
    stream = StreamBeside()
    for at_s in (0.0, 0.1, 0.1001, 0.2, 5.0):
        stream.note(at_s)
    assert stream.arrivals_s == [0.0, 0.1, 0.2, 5.0]
    broken = StreamBeside()
    broken.error, broken.is_over = "500 no", True
    long = TimedAnswer(0.15, 4.0, (4.0,), 16_000, 1, "", "")
    found = measured_of([stream, broken], long, {"memory_bytes": 7.0, "cpu_s": 1.0})
    assert set(found.values) <= set(MEASURES)
    assert found.errors == ("500 no",) and found.values["failed"] == 1
    assert found.values["ttft_p50_s"] == pytest.approx(3.85)
    assert found.values["gap_p99_s"] == pytest.approx(4.8) and "cpu_s" not in found.values
    refused = TimedAnswer(0.15, 0.15, (), 0, 0, "", "400 too long")
    found = measured_of([stream, broken], refused, {})
    assert found.errors == ("400 too long", "500 no") and found.values["failed"] == 2
    assert "ttft_p50_s" not in found.values


def test_the_words_of_a_long_prompt_repeat_no_line() -> None:
    assert words(9_000).startswith(words(300))
    said = words(9_000).split()
    assert len(set(pairwise(said))) == 8_999


class SilentClient:
    """Answers without any text from its second answer on."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ask(
        self,
        question: str,
        tokens_max: int,
        more: Mapping[str, Any],
        on_text: Callable[[float], None],
    ) -> TimedAnswer:
        self.asked.append(question)
        if len(self.asked) == 1:
            on_text(0.5)
        return TimedAnswer(0.0, 1.0, (), 9, tokens_max, "", "")


def test_a_stream_whose_answer_has_no_text_is_over_at_once() -> None:
    stream, client = StreamBeside(), SilentClient()
    asyncio.run(stream.write(cast(TimedClient, client), ["a", "b", "c"], 8))
    assert (stream.error, stream.is_over) == ("an answer had no text", True)
    assert client.asked == ["a", "b"]
