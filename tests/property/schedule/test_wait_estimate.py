"""The estimated wait: whatever was measured, and whatever waits."""

import math

import pytest
from hypothesis import given, strategies as st

from hearth.worker.schedule.wait_estimate import DECODE_S, Pace, Work

TOKENS = st.integers(0, 1_000_000)
SECONDS = st.floats(0, 1e6)
WORKS = st.builds(Work, st.none() | TOKENS, SECONDS)
QUEUES = st.lists(WORKS, max_size=12)
SLOTS = st.integers(1, 5)
CHUNKS = st.lists(st.tuples(st.integers(1, 4096), SECONDS), max_size=6)
ENDS = st.lists(st.tuples(TOKENS, SECONDS), max_size=6)


@st.composite
def paces(draw: st.DrawFn) -> Pace:
    pace = Pace()
    for tokens, seconds in draw(CHUNKS):
        pace.record_chunk(tokens, seconds)
    for tokens, seconds in draw(ENDS):
        pace.record_end(tokens, seconds)
    return pace


@given(paces(), QUEUES, QUEUES, SLOTS)
def test_a_wait_is_finite_and_never_negative(
    pace: Pace, running: list[Work], waiting: list[Work], slots: int
) -> None:
    wait_s = pace.wait_s(running[:slots], waiting, slots)
    assert math.isfinite(wait_s) and wait_s >= 0


@given(paces(), QUEUES, QUEUES, SLOTS, WORKS, st.integers(0, 12))
def test_one_more_in_the_queue_shortens_nobodys_wait(
    pace: Pace, running: list[Work], waiting: list[Work], slots: int, more: Work, at: int
) -> None:
    before = pace.wait_s(running[:slots], waiting, slots)
    after = pace.wait_s(running[:slots], [*waiting[:at], more, *waiting[at:]], slots)
    assert after >= before * (1 - 1e-9)


@given(paces(), QUEUES, QUEUES, SLOTS)
def test_one_more_slot_makes_nobody_wait_longer(
    pace: Pace, running: list[Work], waiting: list[Work], slots: int
) -> None:
    running = running[:slots]
    fewer, more = (pace.wait_s(running, waiting, count) for count in (slots, slots + 1))
    assert more <= fewer * (1 + 1e-9)


@given(paces(), QUEUES, SLOTS)
def test_whoever_finds_a_free_slot_does_not_wait(
    pace: Pace, running: list[Work], slots: int
) -> None:
    assert pace.wait_s(running[: slots - 1], [], slots) == 0


def test_the_prefills_follow_one_another_and_the_answers_are_written_at_once() -> None:
    pace = Pace()
    pace.record_chunk(1_000, 10.0)  # 100 tokens a second
    pace.record_end(400, 5.0)
    assert pace.wait_s([Work(300)], [], 1) == pytest.approx(3 + 5)
    assert pace.wait_s([Work(300), Work(300)], [], 2) == pytest.approx(3 + 5)
    assert pace.wait_s([Work(300), Work(300)], [Work(None)], 2) == pytest.approx(6 + 5)
    early = [Work(300), Work(0, decoding_s=4)]  # its slot is free long before the model is
    assert pace.wait_s(early, [Work(1_000), Work(1_000)], 2) == pytest.approx(3 + 10 + 5)
    assert pace.wait_s([Work(0, decoding_s=4)], [], 1) == pytest.approx(5 / 4), "not about to end"


def test_the_newest_requests_count_most() -> None:
    pace = Pace()
    for _ in range(100):
        pace.record_chunk(100, 10.0)
        pace.record_end(100, 100.0)
    for _ in range(100):
        pace.record_chunk(100, 1.0)
        pace.record_end(100, 1.0)
    assert pace.prefill_tokens_per_s == pytest.approx(100, rel=0.1)
    assert pace.decode_s == pytest.approx(1, rel=0.1)


def test_a_prompt_beside_answers_takes_longer_by_what_they_take() -> None:
    pace = Pace()
    pace.record_beside(5.0)  # no prompt was read yet: it says nothing of how they are
    assert pace.wait_s([Work(0)], [Work(1_000)], 1) == pytest.approx(DECODE_S * 2 + 4.0)
    for _ in range(300):
        pace.record_chunk(100, 1.0)
    alone = pace.wait_s([Work(1_000)], [], 1)
    for _ in range(300):
        pace.record_chunk(100, 1.0)
        pace.record_beside(1.0)
    assert pace.prefill_tokens_per_s == pytest.approx(100), "of a forward, whoever waits for it"
    assert pace.wait_s([Work(1_000)], [], 1) == pytest.approx(alone + 10.0, rel=0.05)
